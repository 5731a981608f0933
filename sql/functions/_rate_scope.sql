-- The lane that a rate is charged to: of a group, or, with p_group_key null, of the queue as a whole.
-- Raises QF001 group key, QF003 unknown queue.
create function fairq._rate_scope(p_queue text, p_group_key text, out shard_no integer, out queue text, out group_key text)
language plpgsql
stable
set search_path = ''
as $$
begin
  if p_group_key is not null then
    perform fairq._check_group(p_queue, p_group_key);
    select fairq._shard_of(p_group_key, s.shard_count), p_queue, p_group_key into shard_no, queue, group_key from fairq.settings s;
    return;
  end if;
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;
  shard_no := 0;
  queue := '#meters';
  group_key := 'queue ' || p_queue;
end;
$$;
comment on function fairq._rate_scope(text, text) is 'The lane that a rate of a group, or of a whole queue, is charged to.';
