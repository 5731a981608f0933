-- Ends attempts, as their holder saw them end, in batches. Outcomes: succeeded; failed (for good); retry (again after a back-off while
-- attempts are left, else failed); cancelled; expired; and two that burn no attempt: declined (this worker cannot run it: others may, after a pause that
-- doubles each time) and interrupted (it began, and the worker ends: back in line, but one that may be tried only once failed). Null arrays mean: all succeeded, no result, no error, the queue's back-off.
-- p_costs: what each attempt used in all, where groups share that (fairness = 'cost'); null: what it reported, else what was expected.
-- Returns the ids that were accepted. A missing one was not this worker's any more, in this attempt: nothing of it was changed (I10).
-- Raises QF011 arrays of different length, QF012 unknown outcome, QF008 bad cost.
-- Locks: held, the rows named, in the order of their ids; no row that others share.
-- Cost: one step in held_pkey and one in tasks_pkey per task.
create function fairq.finish_tasks(
  p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_outcomes text[] default null, p_results jsonb[] default null,
  p_errors jsonb[] default null, p_retry_delays interval[] default null, p_costs double precision[] default null,
  p_shard_no integer default null
) returns setof bigint
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_count integer := coalesce(cardinality(p_ids), 0);
  v_now timestamptz := fairq._now();
  v_unknown text;
  v_shard_no integer;
begin
  if coalesce(cardinality(p_attempts), 0) <> v_count
    or coalesce(cardinality(p_outcomes), v_count) <> v_count
    or coalesce(cardinality(p_results), v_count) <> v_count
    or coalesce(cardinality(p_errors), v_count) <> v_count
    or coalesce(cardinality(p_retry_delays), v_count) <> v_count
    or coalesce(cardinality(p_costs), v_count) <> v_count
  then
    raise exception 'worker % finishes % tasks with arrays of other lengths', coalesce(p_worker_id::text, 'null'), v_count
      using errcode = 'QF011', hint = 'Every array has one element per task, or is null.';
  end if;
  if not p_outcomes <@ array['succeeded', 'failed', 'retry', 'cancelled', 'expired', 'declined', 'interrupted'] then
    select o.outcome into v_unknown
    from unnest(p_outcomes) o(outcome)
    where o.outcome is null or o.outcome not in ('succeeded', 'failed', 'retry', 'cancelled', 'expired', 'declined', 'interrupted');
    raise exception 'worker % finishes a task with the unknown outcome "%"', coalesce(p_worker_id::text, 'null'), coalesce(left(v_unknown, 60), 'null')
      using errcode = 'QF012', hint = 'Use succeeded, failed, retry, cancelled, expired, declined or interrupted.';
  end if;
  perform fairq._check_costs(p_worker_id, p_costs);

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    perform fairq._check_worker(v_shard_no, p_worker_id);
    return query
      select l.*
      from fairq._leave(v_shard_no, fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts, v_now, p_outcomes => p_outcomes, p_results => p_results,
        p_errors => p_errors, p_retry_delays => p_retry_delays, p_costs => p_costs), v_now) l;
  end loop;
end;
$$;
comment on function fairq.finish_tasks is
  'Ends attempts of a worker''s tasks. Returns the ids accepted; stale ones are missing.';
