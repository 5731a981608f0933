-- Ends attempts, as their holder saw them end, in batches. Outcomes: succeeded; failed (for good); retry (again after a back-off while attempts are left, else
-- failed); cancelled; expired; and four that burn no attempt: released (back in line: the next attempt has the next number all the same, and the task may have
-- one more), postponed (not before its retry delay is over), declined (this worker cannot run it: others may, after a pause that doubles each time) and
-- interrupted (it began, and the worker ends: released, but one that may be tried only once failed). Null arrays mean: all succeeded, no result, no error, the
-- queue's back-off. p_costs: what each attempt used in all, where groups share that (fairness = 'cost'); null: what it reported, else what was expected.
-- p_holds: 'group' or 'key', where nothing of the task's group, or with its key, is to start before its retry delay is over.
-- Returns the ids that were accepted. A missing one was not this worker's any more, in this attempt: nothing of it was changed (I10).
-- Raises QF011 arrays of different length, QF012 unknown outcome or hold, QF008 bad cost, QF009 bad delay of a hold.
-- Locks: held, the rows named, in the order of their ids; no row that others share. Cost: one step in held_pkey and one in tasks_pkey per task.
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
    v_tasks := fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts, v_now, p_outcomes => p_outcomes, p_results => p_results, p_errors => p_errors,
      p_retry_delays => p_retry_delays, p_costs => p_costs, p_holds => p_holds);
    if p_holds is not null then
      perform fairq._ring_holds(v_shard_no, v_tasks, p_ids, p_attempts, p_holds, p_retry_delays, v_now);
    end if;
    return query select l.* from fairq._leave(v_shard_no, v_tasks, v_now) l;
  end loop;
end;
$$;
comment on function fairq.finish_tasks is 'Ends attempts of a worker''s tasks. Returns the ids accepted; stale ones are missing.';

-- Raises QF012 for a hold of something else, QF009 where it, or a task that is postponed, has no delay, or one that is longer than a year.
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

-- What tasks that end say of their group or key: nothing of it before then. Only who holds a task of it can say so.
-- A key holds in all shards, as its settings do.
create function fairq._ring_holds(
  p_shard_no integer, p_tasks fairq.leaving[], p_ids bigint[], p_attempts integer[], p_holds text[], p_delays interval[], p_now timestamptz
) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  with held as (
    insert into fairq.rings (shard_no, queue, group_key, configured, hold_until, held_by)
    select s.shard_no, case i.hold when 'key' then '#keys' else b.queue end, case i.hold when 'key' then b.concurrency_key else b.group_key end, true,
      p_now + i.delay, b.id
    from unnest(p_ids, p_attempts, p_holds, p_delays) as i(id, attempt, hold, delay)
    join unnest(p_tasks) t on t.id = i.id and t.attempt = i.attempt
    cross join lateral (
      select k.id, k.queue, k.group_key, k.concurrency_key from fairq.tasks k where k.shard_no = p_shard_no and k.id = i.id offset 0
    ) b
    cross join lateral fairq._shards(case when i.hold = 'group' then p_shard_no end) s(shard_no)
    where i.hold = 'group'
      or i.hold = 'key' and b.concurrency_key is not null
    returning shard_no, queue, group_key, hold_until
  )
  insert into fairq.limit_changes (shard_no, queue, group_key, until)
  select h.shard_no, h.queue, h.group_key, h.hold_until from held h;
end;
$$;
