-- Blocked tasks go back in line at their old place: blocked -> overflow, and ring. By ctid and no other way, see _hold.
create function fairq._line_up(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  with back as (
    update fairq.tasks t
    set state = 'overflow'
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
      and t.state = 'blocked'
    returning t.queue, t.group_key, t.priority, t.sequence
  )
  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  select p_shard_no, b.queue, b.group_key, b.priority, min(b.sequence), true
  from back b
  group by b.queue, b.group_key, b.priority;
end;
$$;
comment on function fairq._line_up(integer, tid[]) is 'Puts blocked tasks back in line.';
