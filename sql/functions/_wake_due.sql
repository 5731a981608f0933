-- Lanes that a rate or a breaker held back until now ring. Scheduled tasks that are due become overflow, behind what their groups have waiting, and ring: the promotion that calls this hears
-- the rings of its own transaction.
-- Locks: tasks, the scheduled rows it moves, "skip locked": retry_task in somebody's open transaction may hold one, and is not waited for.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
begin
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no
    and l.queue = p_tick.queue
    and l.look_at >= p_tick.next_due_at
    and l.look_at <= p_now
  order by l.look_at
  limit p_limit;

  select array_agg(d.ctid) into v_ctids
  from (
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.state = 'scheduled'
      and t.run_at >= p_tick.next_due_at
      and t.run_at <= p_now
    order by t.run_at
    limit p_limit
    for update skip locked
  ) d;
  if v_ctids is not null then
    perform fairq._wake(p_tick.shard_no, p_tick.queue, v_ctids);
  end if;
end;
$$;
comment on function fairq._wake_due(fairq.ticks, timestamptz, integer) is 'Moves due scheduled tasks to overflow.';
