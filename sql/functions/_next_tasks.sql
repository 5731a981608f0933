-- The next tasks of a lane without concurrency keys, in order of priority and of becoming runnable; of each priority p_limit at most.
-- One with a key may be among them all the same, when it committed after the rings were heard: the lane has to stop there until its ring is.
-- One statement, stable, without "set search_path": so it is inlined into _admit, and costs no executor start for every lane.
-- Cost: tasks_overflow_idx from the cursors.
create function fairq._next_tasks(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_cursors fairq.cursor[],
  p_weight double precision,
  p_pace fairq.pace,
  p_limit integer,
  p_now timestamptz
) returns table (ctid tid, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, has_key boolean)
language sql
stable
as $$
  select o.ctid, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end,
    o.has_key
  from unnest(p_cursors) c
  cross join lateral (
    select t.ctid, t.priority, t.sequence, t.cost, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      t.concurrency_key is not null as has_key,
      case when p_pace is distinct from null then fairq._expected(p_pace, t.kind, t.cost) end as charge
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.state = 'overflow'
      and t.priority = c.priority
      and t.sequence >= c.sequence
    order by t.sequence
    limit p_limit
  ) o
$$;
comment on function fairq._next_tasks(integer, text, text, fairq.cursor[], double precision, fairq.pace, integer, timestamptz) is
  'The next tasks of a lane without concurrency keys.';
