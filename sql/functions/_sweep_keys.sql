-- Removes wishes to cancel and progress whose task is gone, watches that ran out, idempotency keys whose task is gone for longer than the retention, and rows of the
-- history's default partitions past every queue's. At most p_limit of each.
-- Returns how many rows it removed.
create function fairq._sweep_keys(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_swept integer := 0;
  v_rows integer;
  v_floor timestamptz := coalesce(to_timestamp(fairq._sweep_floor(p_shard_no, 'keys') / 1000000.0), '-infinity');
begin
  v_swept := v_swept + fairq._remove(p_shard_no, 'cancellations', array(
    select n.ctid
    from fairq.cancellations n
    where n.shard_no = p_shard_no
      and not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.id = n.task_id offset 0)
    limit p_limit
  ));

  v_swept := v_swept + fairq._remove(p_shard_no, 'watches', array(
    select n.ctid
    from fairq.watches n
    where n.shard_no = p_shard_no
      and n.until < p_now
    limit p_limit
  ));

  v_swept := v_swept + fairq._remove(p_shard_no, 'progress', array(
    select n.ctid
    from fairq.progress n
    where n.shard_no = p_shard_no
      and not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.id = n.task_id offset 0)
    limit p_limit
  ));

  v_swept := v_swept + fairq._remove(p_shard_no, 'idempotency_keys', array(
    select n.ctid
    from fairq.idempotency_keys n
    join fairq.queues q on q.queue = n.queue
    where n.shard_no = p_shard_no
      and n.created_at >= v_floor
      and n.created_at < p_now - q.retention
      and not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.id = n.task_id offset 0)
      and not exists (select from fairq.finished_tasks f where f.shard_no = p_shard_no and f.id = n.task_id and f.finished_at >= p_now - q.retention)
    order by n.created_at
    limit p_limit
    for update of n skip locked
  ));
  -- The next sweep starts at the oldest key left.
  select n.created_at into v_floor
  from fairq.idempotency_keys n
  where n.shard_no = p_shard_no
    and n.created_at >= v_floor
  order by n.created_at
  limit 1;
  perform fairq._set_sweep_floor(p_shard_no, 'keys', (extract(epoch from v_floor) * 1000000)::bigint);

  delete from fairq.finished_tasks_default f
  where f.ctid = any(array(
    select n.ctid
    from fairq.finished_tasks_default n
    where n.shard_no = p_shard_no
      and n.finished_at < p_now - (select max(q.retention) from fairq.queues q where not q.internal)
    order by n.finished_at
    limit p_limit
  ));
  get diagnostics v_rows = row_count;
  v_swept := v_swept + v_rows;

  delete from fairq.attempts_default a
  where a.ctid = any(array(
    select n.ctid
    from fairq.attempts_default n
    where n.shard_no = p_shard_no
      and n.ended_at < p_now - (select max(q.retention) from fairq.queues q where not q.internal)
    order by n.ended_at
    limit p_limit
  ));
  get diagnostics v_rows = row_count;
  return v_swept + v_rows;
end;
$$;
comment on function fairq._sweep_keys(integer, integer, timestamptz) is 'Removes keys, wishes and history that nobody needs any more.';
