-- Ends attempts that _finish looked up: one delete or update, whose conditions are the fencing token, because recovery may have taken a task since.
-- Who has to wait for recovery finds another worker in the row, and gets nothing. Who has to wait for settings that began to count the task, too:
-- _finish then looks again. By ctid and no other way, see _hold.
create function fairq._leave(
  p_shard_no integer,
  p_worker_id bigint,
  p_ctids tid[],
  p_attempts integer[],
  p_outcomes text[],
  p_results jsonb[],
  p_errors jsonb[],
  p_run_ats timestamptz[],
  p_counted boolean[],
  p_meters integer[],
  p_started_ats timestamptz[],
  p_now timestamptz
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  return query
    with input as materialized (
      select i.ctid, i.attempt, i.outcome, i.result, i.error, i.run_at, i.counted, i.meters, i.started_at, i.nth
      from unnest(p_ctids, p_attempts, p_outcomes, p_results, p_errors, p_run_ats, p_counted, p_meters, p_started_ats)
        with ordinality as i(ctid, attempt, outcome, result, error, run_at, counted, meters, started_at, nth)
    ),
    ended as (
      delete from fairq.tasks t
      using input i
      where t.shard_no = p_shard_no
        and t.ctid = i.ctid
        and t.attempt = i.attempt
        and t.worker_id = p_worker_id
        and (t.counted, t.meters) = (i.counted, i.meters)
        and i.outcome <> 'retry'
      returning t.*, i.outcome, i.result, i.error, i.nth
    ),
    history as (
      insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at,
        expires_at, started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload,
        result, error)
      select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, e.outcome, e.worker_id, e.created_at, e.run_at,
        e.expires_at, e.started_at, p_now, e.cost, e.attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers,
        e.payload, e.result, e.error
      from ended e
    ),
    retried as (
      update fairq.tasks t
      set state = 'scheduled',
        run_at = i.run_at,
        block = null, position = null, worker_id = null, started_at = null, lease_expires_at = null, counted = false, meters = 0
      from input i
      where i.outcome = 'retry'
        and t.shard_no = p_shard_no
        and t.ctid = i.ctid
        and t.attempt = i.attempt
        and t.worker_id = p_worker_id
        and (t.counted, t.meters) = (i.counted, i.meters)
      returning t.id, t.queue, t.group_key, t.concurrency_key, t.attempt, t.run_at, t.kind, t.charge, i.error, i.counted, i.meters, i.started_at, i.nth
    ),
    attempted as (
      insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, outcome, error)
      select p_shard_no, r.id, r.attempt, p_worker_id, r.started_at, p_now, 'retry', r.error
      from retried r
    ),
    announced as (
      insert into fairq.rings (shard_no, queue, group_key, due_at)
      select p_shard_no, r.queue, min(r.group_key), min(r.run_at)
      from retried r
      group by r.queue
    ),
    timed as (
      -- Where groups share time: what the attempts took beyond what was charged for them.
      insert into fairq.rings (shard_no, queue, group_key, correction, ran)
      select p_shard_no, a.queue, a.group_key, sum(x.seconds - a.charge), (a.kind, count(*), sum(x.seconds))::fairq.estimate
      from (
        select e.queue, e.group_key, e.kind, e.charge, e.started_at from ended e where e.charge is not null
        union all
        select r.queue, r.group_key, r.kind, r.charge, r.started_at from retried r where r.charge is not null
      ) a
      cross join lateral (select fairq._ran(a.started_at, p_now) as seconds) x
      group by a.queue, a.group_key, a.kind
    ),
    limited as (
      select e.queue, e.group_key, e.counted, e.meters, e.concurrency_key, e.outcome, e.nth
      from ended e
      where e.counted or e.meters <> 0 or e.concurrency_key is not null
      union all
      select r.queue, r.group_key, r.counted, r.meters, r.concurrency_key, 'retry', r.nth
      from retried r
      where r.counted or r.meters <> 0 or r.concurrency_key is not null
    ),
    freed as (
      -- Places, and for breakers how the attempts ended: failures after the last success.
      insert into fairq.rings (shard_no, queue, group_key, freed, failures, succeeded)
      select f.shard_no, f.queue, f.group_key, count(*), count(*) filter (where f.outcome in ('failed', 'retry') and f.nth > f.last_success),
        bool_or(f.outcome = 'succeeded')
      from (
        select s.shard_no, s.queue, s.group_key, l.outcome, l.nth,
          coalesce(max(l.nth) filter (where l.outcome = 'succeeded') over (partition by s.shard_no, s.queue, s.group_key), 0) as last_success
        from limited l
        cross join lateral fairq._scopes(p_shard_no, l.queue, l.group_key, l.counted, l.meters, l.concurrency_key) s
      ) f
      group by f.shard_no, f.queue, f.group_key
    )
    select e.id from ended e
    union all
    select r.id from retried r;
end;
$$;
comment on function fairq._leave(integer, bigint, tid[], integer[], text[], jsonb[], jsonb[], timestamptz[], boolean[], integer[], timestamptz[], timestamptz) is 'Ends attempts that were looked up.';
