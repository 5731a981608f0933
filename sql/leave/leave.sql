-- The one way out of flight, whatever the outcome. A task that succeeded, failed, was cancelled or expired becomes history. One that is tried again later waits
-- for its time. One that was released, whose claim ran out, or whose worker was lost, stands in line again at its old place (I12).
-- A task gives back what its own row says that it holds, and nothing else. Rows of held are replaced, never updated: a row that is still where the caller saw
-- it still says what the caller read, and need not have been locked for that. A row that is gone leaves through another session, or not now; a caller that must
-- know looks again.
-- By ctid and no other way: every other scan is switched off. With missing or old statistics the planner finds a walk through all tasks of the shard cheaper
-- than a hundred fetches by ctid, and it keeps such a plan for the whole session. The functions below are planned under these settings.
-- Returns the ids. Locks: the rows named; the caller has locked the ready and parked ones. No row that others share.
create function fairq._leave(p_shard_no integer, p_tasks fairq.leaving[], p_now timestamptz) returns setof bigint
language plpgsql rows 100 set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
declare
  v_all record;
  v_let_go bigint[];
begin
  select array_agg(t.held) filter (where t.held is not null) as held, array_agg(t.ready) filter (where t.ready is not null) as ready,
    array_agg(t.parked) filter (where t.parked is not null) as parked, array_agg(t.body) filter (where t.ends) as ended, bool_or(not t.ends) as comes_back,
    bool_or(t.hold is not null) as holds, bool_or(t.keyed) as keyed,
    bool_or(t.counted or t.user_counted or t.keyed or t.meters <> 0 or t.charge is not null) as gives_back
  into v_all
  from unnest(p_tasks) t;
  if v_all.held is not null then
    with gone as (
      delete from fairq.held h where h.shard_no = p_shard_no and h.ctid = any(v_all.held) returning h.id
    )
    select array_agg(g.id) into v_let_go from gone g;
    if cardinality(v_all.held) > coalesce(cardinality(v_let_go), 0) then
      -- A task that is named twice leaves once, in the way that is named first.
      p_tasks := array(
        select distinct on ((n.task).id) n.task
        from (select t as task, row_number() over () as nth from unnest(p_tasks) t) n
        where (n.task).held is null or (n.task).id = any(v_let_go)
        order by (n.task).id, n.nth
      );
      v_all.ended := (select array_agg(t.body) from unnest(p_tasks) t where t.ends);
    end if;
  end if;
  if v_all.ready is not null then
    delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(v_all.ready);
  end if;
  if v_all.parked is not null then
    delete from fairq.parked k where k.shard_no = p_shard_no and k.ctid = any(v_all.parked);
  end if;
  if v_all.gives_back then perform fairq._give_back(p_shard_no, p_tasks); end if;
  if v_all.keyed then perform fairq._pass_keys_on(p_shard_no, p_tasks); end if;
  if v_all.holds then
    -- A key is held in all shards, as its settings are.
    perform fairq._ring_group(s.shard_no, case t.hold when 'key' then '#keys' else b.queue end, case t.hold when 'key' then b.concurrency_key else b.group_key end,
      p_hold_until => p_now + t.delay, p_held_by => t.id)
    from unnest(p_tasks) t
    join fairq.tasks b on b.shard_no = p_shard_no and b.ctid = t.body
    cross join lateral fairq._shards(case when t.hold = 'group' then p_shard_no end) s(shard_no)
    where t.hold = 'group'
      or t.hold = 'key' and b.concurrency_key is not null;
  end if;
  if v_all.ended is not null then
    return query select e.* from fairq._end(p_shard_no, p_tasks, v_all.ended, p_now) e;
    perform fairq._tell_watchers(p_shard_no, p_tasks, p_now);
  end if;
  if v_all.comes_back then
    return query select b.* from fairq._come_back(p_shard_no, p_tasks, p_now) b;
  end if;
end;
$$;

-- Tasks that ended become history. p_bodies are the ctids of their bodies. By ctid, see _leave, and then by hashing: going through p_tasks for each of them
-- would cost a twentieth of an end.
create function fairq._end(p_shard_no integer, p_tasks fairq.leaving[], p_bodies tid[], p_now timestamptz) returns setof bigint
language plpgsql rows 100 set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off
set enable_nestloop = off as $$
begin
  return query
    with ended as (
      delete from fairq.tasks b
      using unnest(p_tasks) t
      where b.shard_no = p_shard_no and b.ctid = any(p_bodies)
        and t.id = b.id
      returning b.*, t.outcome, t.worker_id, t.started_at, t.used, t.result, t.error, coalesce(t.attempt, b.attempt) as last_attempt
    )
    insert into fairq.finished_tasks as f (shard_no, id, queue, group_key, user_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at,
      started_at, finished_at, cost, used, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload, result, error)
    select e.shard_no, e.id, e.queue, e.group_key, nullif(e.user_key, ''), e.kind, e.priority, e.outcome, e.worker_id, e.created_at, e.run_at, e.expires_at,
      e.started_at, p_now, e.cost, e.used, e.last_attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers, e.payload, e.result,
      e.error
    from ended e
    returning f.id;
end;
$$;

-- The way back, for retry_task: a task that ended without success becomes a body again, in line behind the others of its group, and may have one attempt more
-- than it had. It copies back what _end copied.
-- Returns the body, or no row: there is no such task. Locks: the row of the history.
create function fairq._begin_again(p_shard_no integer, p_id bigint, p_sequence bigint, p_now timestamptz) returns setof fairq.tasks
language plpgsql rows 1 set search_path = pg_catalog, pg_temp as $$
begin
  return query
    with ended as (
      delete from fairq.finished_tasks f
      where f.shard_no = p_shard_no and f.id = p_id and f.outcome <> 'succeeded'
      returning f.*
    )
    insert into fairq.tasks as t (shard_no, id, sequence, queue, group_key, user_key, kind, priority, created_at, run_at, cost, attempt, max_attempts,
      timeout, idempotency_key, concurrency_key, headers, payload, spared)
    select fairq._home(e.group_key), e.id, p_sequence, e.queue, e.group_key, coalesce(e.user_key, ''), e.kind, e.priority, e.created_at, p_now, e.cost, e.attempt,
      greatest(e.max_attempts, e.attempt + 1), e.timeout, e.idempotency_key, e.concurrency_key, e.headers, e.payload, e.attempt
    from ended e
    returning t.*;
end;
$$;

-- A task that leaves rings: the places that came free, how its attempt ended, and what it used beyond what was charged for it.
create function fairq._give_back(p_shard_no integer, p_tasks fairq.leaving[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  -- The places, and for breakers how the attempts ended: failures after the last success.
  insert into fairq.rings (shard_no, queue, group_key, user_key, freed, failures, succeeded)
  select f.shard_no, f.queue, f.group_key, f.user_key, count(*), count(*) filter (where f.outcome in ('failed', 'retry') and f.nth > f.last_success),
    bool_or(f.outcome = 'succeeded')
  from (
    select s.shard_no, s.queue, s.group_key, s.user_key, t.outcome, t.nth,
      coalesce(max(t.nth) filter (where t.outcome = 'succeeded') over (partition by s.shard_no, s.queue, s.group_key, s.user_key), 0) as last_success
    from unnest(p_tasks) with ordinality as t(id, body, held, ready, parked, ends, outcome, result, error, delay, hold, run_at, attempt, worker_id, started_at,
      charge, used, meters, counted, keyed, user_counted, nth)
    join fairq.tasks b on b.shard_no = p_shard_no and b.ctid = t.body
    cross join lateral fairq._scopes(p_shard_no, b.queue, b.group_key, t.counted, t.meters, case when t.keyed then b.concurrency_key end,
      case when t.user_counted then b.user_key end) s
  ) f
  group by f.shard_no, f.queue, f.group_key, f.user_key;

  -- Where groups share what tasks use: that, and what was charged. An attempt that ended without a word is taken to have used what was charged. What a kind
  -- uses is learnt only from attempts that ended by themselves and said what they used.
  insert into fairq.rings (shard_no, queue, group_key, user_key, used, charged, ran)
  select p_shard_no, a.queue, a.group_key, a.user_key, sum(a.used), sum(a.charge),
    case when a.measured then (a.kind, count(*), sum(a.used), sum(a.cost))::fairq.estimate end
  from (
    select b.queue, b.group_key, nullif(b.user_key, '') as user_key, b.kind, b.cost, t.charge, coalesce(t.used, t.charge) as used,
      t.used is not null and t.started_at is not null and t.outcome in ('succeeded', 'failed', 'retry', 'cancelled', 'expired') as measured
    from unnest(p_tasks) t
    join fairq.tasks b on b.shard_no = p_shard_no and b.ctid = t.body
    where t.charge is not null
  ) a
  group by a.queue, a.group_key, a.user_key, a.kind, a.measured;
end;
$$;

-- Wakes the workers of another queue when it is its turn at a key that comes free. Those of the task's own queue are at work, or look soon. The others would
-- sleep on: nobody may promote the task's queue now, and a promotion looks at keys only where tasks wait for one (see _open_keys).
-- Cost: two steps for each key.
create function fairq._pass_keys_on(p_shard_no integer, p_tasks fairq.leaving[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = on set enable_sort = off as $$
begin
  perform pg_notify('fairq', q.queue)
  from (
    select distinct b.queue, b.concurrency_key
    from unnest(p_tasks) t
    cross join lateral fairq._body(p_shard_no, t.id) b
    where t.keyed and b.concurrency_key is not null
  ) f
  cross join lateral (
    select k.queue from fairq.parked k
    where k.shard_no = p_shard_no and k.concurrency_key = f.concurrency_key
      and k.turn >= coalesce((fairq._lane(p_shard_no, '#keys', f.concurrency_key)).finish, 0)
    order by k.turn, k.id limit 1
  ) n
  join fairq.queues q on q.queue = n.queue and q.notify
  -- A transaction that is to commit in two phases must not notify.
  join fairq.queues o on o.queue = f.queue and o.notify
  where n.queue <> f.queue;
end;
$$;

-- Tasks that did not end stand in line again, or wait for their back-off, and ring. Their attempt is noted, and its number is not given out again: worker and
-- attempt are the fencing token, and the same worker may take the task again while a message about the first time is still under way (I10). Only a retry after
-- a failure uses an attempt up; for every other one the task may have one more. Wishes to cancel are rung again: their first ring was heard while the task was
-- held.
create function fairq._come_back(p_shard_no integer, p_tasks fairq.leaving[], p_now timestamptz) returns setof bigint
language plpgsql rows 100 set search_path = pg_catalog, pg_temp as $$
declare
  v_ids bigint[];
begin
  with back as (
    update fairq.tasks b
    set scheduled = coalesce(t.run_at > p_now, false),
      run_at = coalesce(t.run_at, b.run_at),
      attempt = t.attempt,
      max_attempts = b.max_attempts + case when t.outcome <> 'retry' then 1 else 0 end,
      spared = case when t.outcome <> 'retry' then coalesce(b.spared, 0) + 1 else b.spared end,
      -- An attempt that ended by itself clears the task of suspicion.
      losses = case t.outcome when 'worker_lost' then coalesce(b.losses, 0) + 1 when 'retry' then null when 'postponed' then null else b.losses end
    from unnest(p_tasks) t
    where b.shard_no = p_shard_no and b.ctid = t.body and not t.ends
    returning b.id, b.queue, b.group_key, b.user_key, b.priority, b.sequence, b.scheduled, b.run_at, b.concurrency_key, t.outcome, t.error, t.attempt, t.worker_id,
      t.started_at, t.used
  ),
  attempted as (
    insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, used, outcome, error)
    select p_shard_no, b.id, b.attempt, b.worker_id, b.started_at, p_now, b.used, b.outcome, b.error
    from back b
  ),
  in_line as (
    insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, keyed)
    select p_shard_no, b.queue, b.group_key, nullif(b.user_key, ''), b.priority, min(b.sequence), bool_or(b.concurrency_key is not null)
    from back b
    where not b.scheduled
    group by b.queue, b.group_key, b.user_key, b.priority
  ),
  due as (
    insert into fairq.rings (shard_no, queue, group_key, due_at)
    select p_shard_no, b.queue, min(b.group_key), min(b.run_at) from back b where b.scheduled group by b.queue
  )
  select array_agg(b.id) into v_ids from back b;
  perform fairq._ring_wishes(p_shard_no, v_ids);
  return query select u.id from unnest(v_ids) u(id);
end;
$$;

-- Tasks that a worker holds in the attempts named (null: in any), with what they hold, and what becomes of them: p_outcome, unless p_outcomes says otherwise.
-- This is the fencing of finish_tasks. It locks nothing, see _leave.
-- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
create function fairq._find_held(
  p_shard_no integer, p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_now timestamptz, p_outcome text default 'succeeded',
  p_error jsonb default null, p_outcomes text[] default null, p_results jsonb[] default null, p_errors jsonb[] default null,
  p_delays interval[] default null, p_costs double precision[] default null, p_holds text[] default null
) returns fairq.leaving[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_tasks fairq.leaving[];
begin
  select array_agg((i.id, b.ctid, h.ctid, null, null, i.outcome in ('succeeded', 'failed', 'cancelled', 'expired'), i.outcome, i.result, i.error, i.delay, i.hold,
    null, h.attempt, h.worker_id, h.started_at, h.charge, case when h.charge is not null then i.cost end, h.meters, h.counted, h.keyed,
    h.user_counted)::fairq.leaving)
  into v_tasks
  from (
    select u.id, u.attempt, coalesce(u.outcome, p_outcome) as outcome, u.result, coalesce(u.error, p_error) as error,
      u.delay, u.cost, u.hold
    from unnest(p_ids, p_attempts, p_outcomes, p_results, p_errors, p_delays, p_costs, p_holds) as u(id, attempt, outcome, result, error, delay, cost, hold)
    offset 0
  ) i
  cross join lateral (
    select k.ctid, k.attempt, k.worker_id, k.started_at, k.charge, k.meters, k.counted, k.keyed, k.user_counted
    from fairq.held k
    where k.shard_no = p_shard_no and k.id = i.id and k.worker_id = p_worker_id
      and (p_attempts is null or k.attempt = i.attempt)
      and (k.started_at is not null or p_outcome <> 'succeeded' or i.outcome in ('cancelled', 'released', 'declined', 'interrupted'))
    offset 0
  ) h
  cross join lateral (
    select t.ctid from fairq.tasks t where t.shard_no = p_shard_no and t.id = i.id offset 0
  ) b;
  if exists (select from unnest(v_tasks) t where not t.ends or t.charge is not null) then
    v_tasks := fairq._judge(p_shard_no, v_tasks, p_now);
  end if;
  return v_tasks;
end;
$$;

-- What becomes of attempts that did not simply end, and, where groups share that, what they used.
create function fairq._judge(p_shard_no integer, p_tasks fairq.leaving[], p_now timestamptz) returns fairq.leaving[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return (
    select array_agg((t.id, t.body, t.held, null, null, f.outcome in ('succeeded', 'failed', 'cancelled', 'expired'), f.outcome, t.result,
      coalesce(t.error, case when t.outcome = 'interrupted' and f.outcome = 'failed' then '{"code": "interrupted", "message": "its worker ended while it ran"}'::jsonb end),
      t.delay, t.hold, r.run_at, t.attempt, t.worker_id, t.started_at, t.charge,
      case when t.charge is not null then fairq._used(p_shard_no, b.queue, t.id, t.attempt, t.started_at, f.outcome, t.used, p_now) end,
      t.meters, t.counted, t.keyed, t.user_counted)::fairq.leaving)
    from unnest(p_tasks) t
    cross join lateral (
      select k.queue, k.kind, k.max_attempts, coalesce(k.spared, 0) as spared, k.losses, k.expires_at, k.concurrency_key
      from fairq._body(p_shard_no, t.id) k
    ) b
    cross join lateral (
      -- A retry: doubled each time, capped, with 25 percent of jitter both ways. In seconds, because 2^30 times a base of days would overflow an interval. A
      -- pause that the worker asks for is taken as it is; an absurd one is cut to the longest, because refusing it would refuse the whole batch.
      -- A declined task pauses for a second, doubled each time it was spared, five minutes at most: about as long as it has waited already. It pauses for two
      -- seconds at most if a worker that knows its kind is there and only met it later than another one.
      select case
        when t.outcome = 'declined' then p_now + least(power(2, least(b.spared, 30)), case
          when b.losses is null and exists (
            select from fairq.workers w
            where w.shard_no = p_shard_no and b.queue = any(w.queues) and w.kinds ? b.kind and w.lost_at is null
          ) then 2
          else 300
        end) * (0.75 + random() / 2) * interval '1 second'
        -- If its group or key is held, it stands in line at its old place.
        when t.outcome = 'postponed' and (t.hold is null or t.hold = 'key' and b.concurrency_key is null) then p_now + t.delay
        when t.outcome = 'retry' then p_now + coalesce(
          case when fairq._is_span(t.delay, '366 days') then t.delay when t.delay > interval '0' then interval '366 days' end, (
          select least(extract(epoch from q.retry_cap), extract(epoch from q.retry_base) * power(2, least(t.attempt - b.spared - 1, 30)))::double precision
            * (0.75 + random() / 2) * interval '1 second'
          from fairq.queues q
          where q.queue = b.queue
        ))
      end as run_at
      offset 0
    ) r
    cross join lateral (
      -- How many attempts that count it may have: as asked when it was created, or fewer if its worker declares fewer now.
      select case
        when t.outcome in ('retry', 'interrupted', 'worker_lost') then least(b.max_attempts - b.spared, (
          select (w.kinds ->> b.kind)::integer from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = t.worker_id
        ))
      end as attempts
      offset 0
    ) m
    cross join lateral (
      -- Failed: no attempt is left, or the next one would come after the deadline. An attempt that never started was not lost. Losing a worker is no failure of
      -- the task, because a neighbour may have caused it; but a task that loses three workers in a row is the culprit, and one that may be tried only once has
      -- been tried.
      select case
        when t.outcome = 'retry' and (t.attempt - b.spared >= m.attempts or r.run_at >= b.expires_at) then 'failed'
        when t.outcome = 'worker_lost' and t.started_at is null then 'lease_expired'
        when t.outcome = 'worker_lost' and (b.losses >= 2 or m.attempts = 1) then 'failed'
        when t.outcome = 'interrupted' and t.started_at is not null and m.attempts = 1 then 'failed'
        when t.outcome = 'interrupted' then 'released'
        else t.outcome
      end as outcome
      offset 0
    ) f
  );
end;
$$;

-- Ends those tasks of p_ids that wait: in line, scheduled, ready or parked. Those that are being popped are locked and left out. The caller holds the domain,
-- and #keys as well if some of them may wait for a key: turns are passed on only under that lock.
-- Returns the ids. Locks: bodies, ready and parked rows, all "skip locked".
create function fairq._end_waiting(p_shard_no integer, p_ids bigint[], p_outcome text, p_now timestamptz) returns bigint[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_tasks fairq.leaving[];
  v_turns fairq.parked[];
begin
  select array_agg((b.id, b.ctid, null, r.ctid, k.ctid, true, p_outcome, null, null, null, null, null, null, null, null, r.charge, 0, 0, coalesce(r.counted, false),
    coalesce(r.keyed_at is not null or k.granted or k.concurrency_key = '', r.keyed_at is not null), coalesce(r.user_counted, false))::fairq.leaving)
  into v_tasks
  from unnest(p_ids) i(id)
  cross join lateral (
    select t.id, t.ctid from fairq.tasks t
    where t.shard_no = p_shard_no and t.id = i.id
    for update skip locked offset 0
  ) b
  left join lateral (
    select y.ctid, y.charge, y.counted, y.user_counted, y.keyed_at from fairq.ready y
    where y.shard_no = p_shard_no and y.id = i.id
    for update skip locked offset 0
  ) r on true
  left join lateral (
    select p.ctid, p.granted, p.concurrency_key from fairq.parked p
    where p.shard_no = p_shard_no and p.id = i.id
    for update skip locked offset 0
  ) k on true
  where not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = i.id offset 0)
    and (r.ctid is not null or not exists (select from fairq.ready y where y.shard_no = p_shard_no and y.id = i.id offset 0))
    and (k.ctid is not null or not exists (select from fairq.parked p where p.shard_no = p_shard_no and p.id = i.id offset 0));

  -- A task that has its group's turn at a key passes it on.
  v_turns := array(
    select p
    from unnest(v_tasks) t
    cross join lateral (select k from fairq.parked k where k.shard_no = p_shard_no and k.id = t.id and k.turn is not null offset 0) y(p)
    where t.parked is not null
  );
  p_ids := array(select l.* from fairq._leave(p_shard_no, v_tasks, p_now) l);
  perform fairq._next_turn(p) from unnest(v_turns) p;
  return p_ids;
end;
$$;

-- The one list of the counters in which a task in flight takes a place: its group's, its user's there, its concurrency key's, its queue's, the cluster's. A
-- task that leaves rings each of them.
create function fairq._scopes(
  p_shard_no integer, p_queue text, p_group_key text, p_counted boolean, p_meters integer, p_concurrency_key text, p_user_key text
) returns table (shard_no integer, queue text, group_key text, user_key text)
language sql immutable rows 1 as $$
  select p_shard_no, p_queue, p_group_key, null where p_counted
  union all
  select p_shard_no, p_queue, p_group_key, p_user_key where p_user_key is not null
  union all
  select p_shard_no, '#keys', p_concurrency_key, null where p_concurrency_key is not null
  union all
  select 0, '#queue ' || p_queue, 'queue ' || p_queue, null where p_meters & 1 <> 0
  union all
  select 0, '#cluster', 'cluster', null where p_meters & 2 <> 0
$$;

-- Announces the ends of those of these tasks that somebody watches. Where nobody does it sends no NOTIFY, which takes a database-wide lock at commit.
-- Nearly always nobody watches, and one look into an index is all. It has planner settings of its own, because its callers' settings differ.
-- Cost: one step in watches_task_idx per task, and only while anything is watched.
create function fairq._tell_watchers(p_shard_no integer, p_tasks fairq.leaving[], p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp set plan_cache_mode = 'force_generic_plan' set enable_seqscan = off set enable_bitmapscan = off
set enable_indexscan = on as $$
declare
  v_watched bigint[];
begin
  if not exists (select from fairq.watches w where w.shard_no = p_shard_no and w.until > p_now) then
    return;
  end if;
  select array_agg(t.id) into v_watched from unnest(p_tasks) t
  where t.ends
    and exists (select from fairq.watches w where w.shard_no = p_shard_no and w.task_id = t.id and w.until > p_now offset 0);
  if v_watched is not null then
    -- A notice is limited in length: for many tasks it names none, and everybody looks.
    perform pg_notify('fairq_done', case when cardinality(v_watched) <= 200 then array_to_string(v_watched, ',') else '' end);
  end if;
end;
$$;

-- Rings for these tasks, which stand in line or are scheduled, as if they had just been created; and again for those that somebody asked to cancel.
-- _come_back does the same with the rows that it has at hand: to read them again would cost a tenth of it.
-- Cost: a step in tasks_pkey per task.
create function fairq._announce(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = on as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, keyed)
  select p_shard_no, t.queue, t.group_key, nullif(t.user_key, ''), t.priority, min(t.sequence), bool_or(t.concurrency_key is not null)
  from unnest(p_ids) i(id)
  cross join lateral fairq._body(p_shard_no, i.id) t
  where not t.scheduled
  group by t.queue, t.group_key, t.user_key, t.priority;
  insert into fairq.rings (shard_no, queue, group_key, due_at)
  select p_shard_no, t.queue, min(t.group_key), min(t.run_at)
  from unnest(p_ids) i(id)
  cross join lateral fairq._body(p_shard_no, i.id) t
  where t.scheduled
  group by t.queue;
  perform fairq._ring_wishes(p_shard_no, p_ids);
end;
$$;

-- Rings again for those of these tasks that somebody asked to cancel, except those that are surely held: a holder learns of it with its heartbeat. A task whose
-- row in held is locked may be coming back right now.
-- Locks: none that stay. The only way to see whether a row is locked is to lock it, and its holder would then wait for this transaction; so these locks are
-- given back at once.
create function fairq._ring_wishes(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = on as $$
declare
  v_wished bigint[] := array(
    select i.id from unnest(p_ids) i(id)
    where exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
  );
  v_held bigint[];
begin
  if v_wished = '{}' then return; end if;
  begin
    v_held := array(select h.id from fairq.held h where h.shard_no = p_shard_no and h.id = any(v_wished) for key share skip locked);
    raise sqlstate 'UNDO0';
  exception when sqlstate 'UNDO0' then
    -- Variables keep their values.
    null;
  end;
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select p_shard_no, t.queue, t.group_key, t.id
  from unnest(v_wished) i(id)
  cross join lateral fairq._body(p_shard_no, i.id) t
  where i.id <> all(v_held);
end;
$$;

-- Deletes rows that nobody needs any more from the table named. By ctid and no other way, see _leave. On the hot path only for ready and lanes, which have
-- statements of their own: one that is put together is four times as slow.
-- Returns how many rows it deleted. Locks: the rows named; the caller holds what protects them.
create function fairq._remove(p_shard_no integer, p_table text, p_ctids tid[]) returns integer
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
declare
  v_count integer := 0;
begin
  if p_table = 'lanes' then
    delete from fairq.lanes l where l.shard_no = p_shard_no and l.ctid = any(p_ctids);
    get diagnostics v_count = row_count;
  elsif p_table = 'ready' then
    delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    get diagnostics v_count = row_count;
  elsif p_ctids <> '{}' then
    execute format('delete from fairq.%I n where n.shard_no = $1 and n.ctid = any($2)', p_table) using p_shard_no, p_ctids;
    get diagnostics v_count = row_count;
  end if;
  return v_count;
end;
$$;
