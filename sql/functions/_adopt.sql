-- Tasks in flight whose group gets its first limit, or loses its last: from now on they are counted, or no longer. The lane hears of those that came
-- to be counted as places taken (freed less than nothing), of the others as places freed. For all groups of the queue when p_group_key is null.
-- A queued task that is being popped is waited for; a held one that is being finished is leaving, and left alone.
-- Locks: tasks in flight; the caller holds the domain, so none is promoted meanwhile.
-- Cost: the ready set and all held tasks. For settings, not for the hot path.
create function fairq._adopt(p_shard_no integer, p_queue fairq.queues, p_group_key text) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_queued tid[];
  v_held tid[];
begin
  v_queued := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue.queue
      and t.state = 'queued'
      and (p_group_key is null or t.group_key = p_group_key)
    for update
  );
  v_held := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue.queue
      and t.worker_id is not null
      and (p_group_key is null or t.group_key = p_group_key)
    for update skip locked
  );
  with wanted as materialized (
    select t.ctid, t.group_key, fairq._counts(fairq._policy(p_queue, g)) as counted
    from fairq.tasks t
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = p_queue.queue and g.group_key = t.group_key
    where t.shard_no = p_shard_no
      and t.ctid = any(v_queued || v_held)
      and t.counted <> fairq._counts(fairq._policy(p_queue, g))
  ),
  changed as (
    update fairq.tasks t
    set counted = w.counted
    from wanted w
    where t.shard_no = p_shard_no
      and t.ctid = w.ctid
    returning t.group_key, t.counted
  )
  insert into fairq.rings (shard_no, queue, group_key, freed)
  select p_shard_no, p_queue.queue, c.group_key, sum(case when c.counted then -1 else 1 end)
  from changed c
  group by c.group_key;
end;
$$;
comment on function fairq._adopt(integer, fairq.queues, text) is 'Begins or ceases to count tasks in flight whose limits changed.';
