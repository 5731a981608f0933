-- "Look at this group": its settings changed. Workers that sleep are woken.
create function fairq._ring_group(p_shard_no integer, p_queue text, p_group_key text) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  insert into fairq.rings (shard_no, queue, group_key) values (p_shard_no, p_queue, p_group_key);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
end;
$$;
comment on function fairq._ring_group(integer, text, text) is 'Rings a group whose settings changed.';
