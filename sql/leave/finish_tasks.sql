-- Ends attempts in batches, with the outcome that their holder reports:
--   succeeded, cancelled, expired;
--   failed: for good;
--   retry: again after a back-off while attempts are left, else failed;
-- and four outcomes that use up no attempt (the next attempt has the next number, and the task may have one more):
--   released: back in line;
--   postponed: not before its retry delay is over;
--   declined: this worker cannot run it, others may, after a pause that doubles each time;
--   interrupted: it began, and its worker ends; released, but failed if it may be tried only once.
-- Null arrays mean: all succeeded, no result, no error, the queue's back-off. p_costs: what each attempt used in all, where groups share that (fairness =
-- 'cost'); null: what it reported, else what was expected. p_holds: 'group' or 'key': nothing of the task's group, or with its key, starts before its retry
-- delay is over.
-- Returns the ids that were accepted. A missing one was not this worker's any more in this attempt, and nothing of it was changed (I10).
-- Raises QF011 arrays of different length, QF012 unknown outcome or hold, QF008 bad cost, QF009 bad delay of a hold.
-- Locks: held, the rows named, in the order of their ctids, and after them those that somebody replaced meanwhile; no row that others share. If two sessions of
-- one worker end the same tasks while a third starts one of them, they may deadlock, and one of them gets 40P01.
-- Cost: one step in held_pkey and one in tasks_pkey per task.
create function fairq.finish_tasks(
  p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_outcomes text[] default null, p_results jsonb[] default null,
  p_errors jsonb[] default null, p_retry_delays interval[] default null, p_costs double precision[] default null,
  p_holds text[] default null, p_shard_no integer default null
) returns setof bigint
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_outcomes constant text[] := array['succeeded', 'failed', 'retry', 'cancelled', 'expired', 'released', 'declined', 'interrupted', 'postponed'];
  v_shard_no integer;
  v_tasks fairq.leaving[];
  v_ended integer;
begin
  perform fairq._check_lengths(array[coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0), cardinality(p_outcomes), cardinality(p_results),
    cardinality(p_errors), cardinality(p_retry_delays), cardinality(p_costs), cardinality(p_holds)]);
  if not p_outcomes <@ v_outcomes then
    raise exception 'worker % finishes a task with the unknown outcome "%"', coalesce(p_worker_id::text, 'null'),
      (select coalesce(left(o.outcome, 60), 'null') from unnest(p_outcomes) o(outcome) where (o.outcome = any(v_outcomes)) is not true limit 1)
      using errcode = 'QF012', hint = format('Use %s.', array_to_string(v_outcomes, ', '));
  end if;
  perform fairq._check_costs(p_worker_id, p_costs);
  perform fairq._check_holds(p_worker_id, p_outcomes, p_holds, p_retry_delays);

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    perform fairq._check_worker(v_shard_no, p_worker_id);
    -- Repeated for rows that somebody replaced between the look and the end.
    loop
      v_tasks := fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts, v_now, p_outcomes => p_outcomes, p_results => p_results, p_errors => p_errors,
        p_delays => p_retry_delays, p_costs => p_costs, p_holds => p_holds);
      return query select l.* from fairq._leave(v_shard_no, v_tasks, v_now) l;
      get diagnostics v_ended = row_count;
      exit when v_ended = coalesce(cardinality(v_tasks), 0);
    end loop;
  end loop;
end;
$$;
comment on function fairq.finish_tasks is 'Ends attempts of a worker''s tasks. Returns the ids accepted; stale ones are missing.';

-- Raises QF012 for a hold of something else; QF009 where a hold, or a postponed task, has no delay or one longer than a year.
create function fairq._check_holds(p_worker_id bigint, p_outcomes text[], p_holds text[], p_delays interval[]) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_wrong record;
begin
  if p_holds is null and not 'postponed' = any(p_outcomes) is true then return; end if;
  select h.hold, h.delay into v_wrong from unnest(p_outcomes, p_holds, p_delays) as h(outcome, hold, delay)
  where h.hold not in ('group', 'key')
    or (h.hold is not null or h.outcome = 'postponed') and not coalesce(h.delay > interval '0' and fairq._is_span(h.delay, interval '366 days'), false)
  limit 1;
  if not found then return; end if;
  if v_wrong.hold not in ('group', 'key') then
    raise exception 'worker % holds "%"', coalesce(p_worker_id::text, 'null'), left(v_wrong.hold, 60)
      using errcode = 'QF012', hint = 'Hold the group or the key of a task; null: only the task itself waits.';
  end if;
  raise exception 'worker % has something wait for %', coalesce(p_worker_id::text, 'null'), coalesce(v_wrong.delay::text, 'null')
    using errcode = 'QF009', hint = 'A retry delay of more than 0, at most 366 days.';
end;
$$;
