-- The one way out of flight, whatever the outcome. A task that succeeded, failed, was cancelled or expired is history; one that is tried again later
-- waits for its time; one that was released, whose claim ran out, or whose worker was lost stands in line again, at its old place (I12).
-- What a task gives back is what its own row said that it holds, and the caller has read under the row's lock; nothing else.
-- Whatever leaves rings: the places that came free, what an attempt took beyond what was charged for it, where it stands in line again.
-- The attempt of a task that comes back has a number that is not given out again: worker and attempt are the fencing token, and the same worker may take
-- the task again while a message about the first time is still under way (I10). One that was given back may have one more.
-- By ctid and no other way: every other scan is switched off. Where statistics are missing or old, the planner finds a walk through all tasks of the
-- shard cheaper than a hundred fetches by ctid, and it keeps such a plan for the whole session.
-- Returns the ids.
-- Locks: the rows named, which the caller has locked. No row that others share.
create function fairq._leave(p_shard_no integer, p_tasks fairq.leaving[], p_now timestamptz) returns setof bigint
language plpgsql rows 100 set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
begin
  if p_tasks is null or p_tasks = '{}' then
    return;
  end if;
  return query
    with task as materialized (
      select t.id, t.body, t.held, t.ready, t.parked, t.outcome, t.result, t.error, t.run_at, t.attempt, t.worker_id, t.started_at, t.charge, t.meters,
        t.counted, t.keyed, t.nth, t.outcome in ('succeeded', 'failed', 'cancelled', 'expired') as ends
      from unnest(p_tasks) with ordinality as t(id, body, held, ready, parked, outcome, result, error, run_at, attempt, worker_id, started_at, charge, meters,
        counted, keyed, nth)
    ),
    unheld as (
      delete from fairq.held h where h.shard_no = p_shard_no and h.ctid = any(array(select t.held from task t where t.held is not null))
    ),
    unready as (
      delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(array(select t.ready from task t where t.ready is not null))
    ),
    unparked as (
      delete from fairq.parked k where k.shard_no = p_shard_no and k.ctid = any(array(select t.parked from task t where t.parked is not null))
    ),
    ended as (
      delete from fairq.tasks b
      using task t
      where b.shard_no = p_shard_no
        and b.ctid = t.body
        and t.ends
      returning b.*, t.outcome, t.result, t.error, t.started_at, t.worker_id, coalesce(t.attempt, b.attempt) as last_attempt,
        t.charge, t.meters, t.counted, t.keyed, t.nth
    ),
    history as (
      insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at,
        expires_at, started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload,
        result, error)
      select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, e.outcome, e.worker_id, e.created_at, e.run_at,
        e.expires_at, e.started_at, p_now, e.cost, e.last_attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers,
        e.payload, e.result, e.error
      from ended e
    ),
    back as (
      update fairq.tasks b
      set scheduled = t.outcome = 'retry' and t.run_at > p_now,
        run_at = coalesce(t.run_at, b.run_at),
        attempt = t.attempt,
        max_attempts = b.max_attempts + case when t.outcome in ('released', 'lease_expired') then 1 else 0 end
      from task t
      where b.shard_no = p_shard_no
        and b.ctid = t.body
        and not t.ends
      returning b.id, b.queue, b.group_key, b.kind, b.priority, b.sequence, b.scheduled, b.run_at, b.concurrency_key, t.outcome, t.error, t.attempt,
        t.worker_id, t.started_at, t.charge, t.meters, t.counted, t.keyed, t.nth
    ),
    attempted as (
      insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, outcome, error)
      select p_shard_no, b.id, b.attempt, b.worker_id, b.started_at, p_now, b.outcome, b.error
      from back b
    ),
    in_line as (
      insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
      select p_shard_no, b.queue, b.group_key, b.priority, min(b.sequence), bool_or(b.concurrency_key is not null)
      from back b
      where not b.scheduled
      group by b.queue, b.group_key, b.priority
    ),
    due as (
      insert into fairq.rings (shard_no, queue, group_key, due_at)
      select p_shard_no, b.queue, min(b.group_key), min(b.run_at)
      from back b
      where b.scheduled
      group by b.queue
    ),
    left_flight as (
      select e.queue, e.group_key, e.kind, e.concurrency_key, e.outcome, e.started_at, e.charge, e.meters, e.counted, e.keyed, e.nth
      from ended e
      where e.counted or e.keyed or e.meters <> 0 or e.charge is not null
      union all
      select b.queue, b.group_key, b.kind, b.concurrency_key, b.outcome, b.started_at, b.charge, b.meters, b.counted, b.keyed, b.nth
      from back b
      where b.counted or b.keyed or b.meters <> 0 or b.charge is not null
    ),
    timed as (
      -- Where groups share time: what the attempts took beyond what was charged for them. Only one that ended by itself tells how long its kind takes.
      insert into fairq.rings (shard_no, queue, group_key, correction, ran)
      select p_shard_no, a.queue, a.group_key, sum(a.seconds - a.charge),
        case when a.measured then (a.kind, count(*), sum(a.seconds))::fairq.estimate end
      from (
        select l.queue, l.group_key, l.kind, l.charge, fairq._ran(l.started_at, p_now) as seconds,
          l.started_at is not null and l.outcome in ('succeeded', 'failed', 'retry', 'cancelled', 'expired') as measured
        from left_flight l
        where l.charge is not null
      ) a
      group by a.queue, a.group_key, a.kind, a.measured
    ),
    freed as (
      -- Places, and for breakers how the attempts ended: failures after the last success.
      insert into fairq.rings (shard_no, queue, group_key, freed, failures, succeeded)
      select f.shard_no, f.queue, f.group_key, count(*), count(*) filter (where f.outcome in ('failed', 'retry') and f.nth > f.last_success),
        bool_or(f.outcome = 'succeeded')
      from (
        select s.shard_no, s.queue, s.group_key, l.outcome, l.nth,
          coalesce(max(l.nth) filter (where l.outcome = 'succeeded') over (partition by s.shard_no, s.queue, s.group_key), 0) as last_success
        from left_flight l
        cross join lateral fairq._scopes(p_shard_no, l.queue, l.group_key, l.counted, l.meters, case when l.keyed then l.concurrency_key end) s
      ) f
      group by f.shard_no, f.queue, f.group_key
    )
    select e.id from ended e
    union all
    select b.id from back b;

  -- Nearly always nobody waits, and this look into an index is all.
  if exists (select from fairq.watches w where w.shard_no = p_shard_no and w.until > p_now) then
    perform fairq._tell_watchers(p_shard_no, array(select t.id from unnest(p_tasks) t), p_now);
  end if;
  if exists (select from unnest(p_tasks) t where t.outcome in ('retry', 'released', 'lease_expired', 'worker_lost')) then
    perform fairq._ring_wishes(p_shard_no, array(select t.id from unnest(p_tasks) t));
  end if;
end;
$$;

-- Tasks that a worker holds in the attempts named, locked, with what they hold. The fencing of finish, release and start.
-- Each is looked up by its id, in the order of the ids: two calls with the same tasks wait for each other and do not deadlock.
-- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
create function fairq._find_held(
  p_shard_no integer, p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_outcomes text[], p_results jsonb[], p_errors jsonb[],
  p_retry_delays interval[], p_now timestamptz
) returns fairq.leaving[]
language plpgsql set search_path = '' as $$
begin
  return (
    select array_agg((b.id, b.ctid, h.ctid, null, null,
      -- No attempt is left, or the next one would come after the deadline.
      case when i.outcome = 'retry' and (h.attempt >= b.max_attempts or r.run_at >= b.expires_at) then 'failed' else i.outcome end,
      i.result, i.error, r.run_at, h.attempt, h.worker_id, h.started_at, h.charge, h.meters, h.counted, h.keyed)::fairq.leaving)
    from (
      select u.id, u.attempt, coalesce(u.outcome, 'succeeded') as outcome, u.result, u.error, u.retry_delay
      from unnest(p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays) as u(id, attempt, outcome, result, error, retry_delay)
      order by u.id
      offset 0
    ) i
    cross join lateral (
      select k.ctid, k.attempt, k.worker_id, k.started_at, k.charge, k.meters, k.counted, k.keyed
      from fairq.held k
      where k.shard_no = p_shard_no and k.id = i.id and k.attempt = i.attempt and k.worker_id = p_worker_id
        and (k.started_at is not null or i.outcome = 'released')
      for update
      offset 0
    ) h
    cross join lateral (
      select t.id, t.ctid, t.queue, t.max_attempts, t.expires_at
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = i.id
      offset 0
    ) b
    cross join lateral (
      select case
        when i.outcome = 'retry' then p_now + coalesce(
          -- An absurd one is as long as the longest: refusing it would refuse the worker's whole batch.
          case when fairq._is_span(i.retry_delay, '366 days') then i.retry_delay when i.retry_delay > interval '0' then interval '366 days' end, (
          select fairq._backoff(q.retry_base, q.retry_cap, h.attempt) from fairq.queues q where q.queue = b.queue
        ))
      end as run_at
      offset 0
    ) r
  );
end;
$$;

-- Tasks that a worker holds, all of them or those among p_ids, at most p_limit, locked. A task that its worker is finishing this very moment is locked and
-- skipped: let it.
-- No index leads from a worker to its tasks: that would be one more to write for each task, and only who leaves or is lost is looked for.
create function fairq._find_of_worker(
  p_shard_no integer, p_worker_id bigint, p_ids bigint[], p_outcome text, p_error jsonb, p_limit integer default 100000
) returns fairq.leaving[]
language plpgsql set search_path = '' as $$
begin
  return (
    select array_agg((h.id, b.ctid, h.ctid, null, null,
      case when p_outcome <> 'worker_lost' then p_outcome when h.started_at is null then 'lease_expired' when h.attempt >= b.max_attempts then 'failed'
        else p_outcome end,
      null, p_error, null, h.attempt, h.worker_id, h.started_at, h.charge, h.meters, h.counted, h.keyed)::fairq.leaving)
    from (
      select k.ctid, k.id, k.attempt, k.worker_id, k.started_at, k.charge, k.meters, k.counted, k.keyed
      from fairq.held k
      where k.shard_no = p_shard_no and k.worker_id = p_worker_id
        and (p_ids is null or k.id = any(p_ids))
      limit p_limit
      for update skip locked
    ) h
    cross join lateral (
      select t.ctid, t.max_attempts
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = h.id
      offset 0
    ) b
  );
end;
$$;

-- Waiting tasks among p_ids: in line, scheduled, ready or parked; those that are being popped are locked, and left out. With what they hold.
-- The caller holds the domain.
create function fairq._find_waiting(p_shard_no integer, p_ids bigint[], p_outcome text, p_error jsonb) returns fairq.leaving[]
language plpgsql set search_path = '' as $$
declare
  v_tasks fairq.leaving[];
begin
  select array_agg((b.id, b.ctid, null, r.ctid, k.ctid, p_outcome, null, p_error, null, null, null, null, r.charge, 0,
    coalesce(r.counted, false), coalesce(r.keyed, k.granted, false))::fairq.leaving)
  into v_tasks
  from unnest(p_ids) i(id)
  cross join lateral (
    select t.id, t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.id = i.id
    for update skip locked
    offset 0
  ) b
  left join lateral (
    select y.ctid, y.charge, y.counted, y.keyed
    from fairq.ready y
    where y.shard_no = p_shard_no and y.id = i.id
    for update skip locked
    offset 0
  ) r on true
  left join lateral (
    select p.ctid, p.granted, p.turn
    from fairq.parked p
    where p.shard_no = p_shard_no and p.id = i.id
    for update skip locked
    offset 0
  ) k on true
  where not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = i.id offset 0)
    and (r.ctid is not null or not exists (select from fairq.ready y where y.shard_no = p_shard_no and y.id = i.id offset 0))
    and (k.ctid is not null or not exists (select from fairq.parked p where p.shard_no = p_shard_no and p.id = i.id offset 0));

  -- Who leaves with a group's turn at a key passes it on.
  perform fairq._next_turn(p_shard_no, p.concurrency_key, p.queue, p.group_key, p.turn, p_ids)
  from unnest(v_tasks) t
  cross join lateral (
    select y.turn, y.concurrency_key, y.queue, y.group_key
    from fairq.parked y
    where y.shard_no = p_shard_no and y.id = t.id and y.turn is not null
    offset 0
  ) p
  where t.parked is not null;
  return v_tasks;
end;
$$;

-- Ends waiting tasks: cancelled, expired. Returns how many it ended.
create function fairq._end_tasks(p_shard_no integer, p_ids bigint[], p_outcome text, p_error jsonb, p_now timestamptz) returns integer
language plpgsql set search_path = '' as $$
begin
  return (select count(*)::integer from fairq._leave(p_shard_no, fairq._find_waiting(p_shard_no, p_ids, p_outcome, p_error), p_now));
end;
$$;

-- Where a task in flight holds places: with its group, its concurrency key, its queue, the cluster. Each is a counter of its own, and a task that leaves
-- rings each of them. The one list.
create function fairq._scopes(
  p_shard_no integer, p_queue text, p_group_key text, p_counted boolean, p_meters integer, p_concurrency_key text
) returns table (shard_no integer, queue text, group_key text)
language sql immutable rows 1 as $$
  select p_shard_no, p_queue, p_group_key where p_counted
  union all
  select p_shard_no, '#keys', p_concurrency_key where p_concurrency_key is not null
  union all
  select 0, '#meters', 'queue ' || p_queue where p_meters & 1 <> 0
  union all
  select 0, '#meters', 'cluster' where p_meters & 2 <> 0
$$;

-- Announces the ends of those of these tasks that somebody watches; where nobody does, no NOTIFY, which takes a database-wide lock at commit.
-- The callers have settings of their own for their plans; this one has its own, too.
-- Cost: the watches that have not run out, never those behind them.
create function fairq._tell_watchers(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns void
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set enable_seqscan = off set enable_bitmapscan = off
set enable_indexscan = on as $$
declare
  v_watched bigint[];
begin
  select array_agg(distinct w.task_id) into v_watched
  from fairq.watches w
  where w.shard_no = p_shard_no and w.until > p_now and w.task_id = any(p_ids);
  if v_watched is not null then
    -- A notice has its limits: of many it names none, and everybody looks.
    perform pg_notify('fairq_done', case when cardinality(v_watched) <= 200 then array_to_string(v_watched, ',') else '' end);
  end if;
end;
$$;

-- Tasks that come back in line although somebody wished to cancel them: the wish is rung again, since the ring that told of it was heard while the task
-- was held.
create function fairq._ring_wishes(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = on as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select p_shard_no, t.queue, t.group_key, t.id
  from unnest(p_ids) i(id)
  cross join lateral (
    select k.id, k.queue, k.group_key
    from fairq.tasks k
    where k.shard_no = p_shard_no and k.id = i.id
      and not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = i.id offset 0)
      and exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
    offset 0
  ) t;
end;
$$;

-- Deletes rows of the engine's own notes: lanes that were replaced, rings, ticks, keys and wishes that nobody needs any more. By ctid and no
-- other way, see _leave.
-- Returns how many rows it deleted.
-- Locks: the rows named; the caller holds what protects them.
create function fairq._remove(p_shard_no integer, p_table text, p_ctids tid[]) returns integer
language plpgsql set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
declare
  v_count integer;
begin
  case p_table
    when 'lanes' then delete from fairq.lanes r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'rings' then delete from fairq.rings r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'ticks' then delete from fairq.ticks r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'cancellations' then delete from fairq.cancellations r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'watches' then delete from fairq.watches r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'progress' then delete from fairq.progress r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'ready' then delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'idempotency_keys' then delete from fairq.idempotency_keys r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
  end case;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;

-- Seconds of worker time that an attempt counts for: from its start to now, an hour at most, so that one that hangs does not banish its group;
-- nothing when it never started.
create function fairq._ran(p_started_at timestamptz, p_now timestamptz) returns double precision
language sql immutable parallel safe
as $$ select least(3600, greatest(0, coalesce(extract(epoch from p_now - p_started_at)::double precision, 0))) $$;

-- Pause before the next attempt: doubled each time, capped, 25 percent of jitter both ways.
create function fairq._backoff(p_base interval, p_cap interval, p_attempt integer) returns interval
language sql as $$
  -- In seconds: 2^30 times a base of days would overflow an interval. It is past every cap that matters, and more would overflow in the end, too.
  select least(extract(epoch from p_cap), extract(epoch from p_base) * power(2, least(p_attempt - 1, 30)))::double precision
    * (0.75 + random() / 2) * interval '1 second'
$$;
