-- Scheduled tasks that are due become overflow, behind what their groups have waiting, and ring: the promotion that calls this hears
-- the rings of its own transaction.
-- Locks: tasks, the scheduled rows it moves; the caller holds the domain, so nobody else does.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  with due as materialized (
    select t.ctid, t.run_at
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.state = 'scheduled'
      and t.run_at >= p_tick.next_due_at
      and t.run_at <= p_now
    order by t.run_at
    limit p_limit
  ),
  numbered as materialized (
    select d.ctid, nextval('fairq.task_ids') as sequence
    from (select due.ctid from due order by due.run_at) d
  ),
  woken as (
    update fairq.tasks t
    set state = 'overflow', sequence = n.sequence
    from numbered n
    where t.shard_no = p_tick.shard_no
      and t.ctid = n.ctid
    returning t.group_key, t.priority, t.sequence
  )
  insert into fairq.rings (shard_no, queue, group_key, priority, sequence)
  select p_tick.shard_no, p_tick.queue, w.group_key, w.priority, min(w.sequence)
  from woken w
  group by w.group_key, w.priority;
end;
$$;
comment on function fairq._wake_due(fairq.ticks, timestamptz, integer) is 'Moves due scheduled tasks to overflow.';
