-- Takes the next tasks of a queue in served order and hands them to a worker, which finishes, releases or loses each of them. Alone enough for a
-- consumer in any language: it promotes by itself when it has to.
-- With p_claim_lease the tasks are claimed, not running: they must be started (start_tasks) before the lease ends, or others get them.
-- Returns the tasks, at most p_limit, in served order; no row when there is nothing to do, and then nothing was written.
-- Raises QF003 unknown queue, QF004 unknown worker, QF005 not READ COMMITTED, QF007 bad limit, QF009 bad lease, QF015 claim leases under a cap of
-- the cluster.
-- Locks: the tasks it returns; the domain when it promotes. Commit before working on the tasks.
create function fairq.pop_tasks(
  p_queue text, p_limit integer, p_worker_id bigint, p_claim_lease interval default null, p_shard_no integer default null
) returns setof fairq.popped
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_left integer := p_limit;
  v_popped integer;
  v_first integer := floor(random() * 4096)::integer;
  v_may_wait boolean := true;
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation(p_queue);
  perform fairq._check_length('the claim lease', p_claim_lease, interval '366 days');
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;

  -- With several shards, each pop begins with another one. Only there it may have to wait, so it never waits with a domain or tasks of another in hand.
  for v_shard_no in
    select ((s.shard_no + v_first) % s.shard_count)::integer
    from (select h.shard_no, count(*) over () as shard_count from fairq._shards(null) h(shard_no)) s
    where p_shard_no is null
    union all
    select p_shard_no where p_shard_no is not null
  loop
    return query select t.* from fairq._pop(v_shard_no, p_queue, v_left, p_worker_id, p_claim_lease, v_may_wait) t;
    get diagnostics v_popped = row_count;
    v_may_wait := false;
    v_left := v_left - v_popped;
    exit when v_left = 0;
  end loop;
end;
$$;
comment on function fairq.pop_tasks is 'Hands the next tasks of a queue to a worker, in served order.';

-- Pops from one domain. What is ready before the horizon is taken as it stands, while there is no news and it is enough. Otherwise this pop promotes, and is
-- handed what it needs on the way.
-- Another session that holds the domain's lock is promoting already; it is waited for only when there is nothing else to do, and not for long. p_may_wait
-- says that this call holds nothing in another shard yet: who promotes all shards in their order may be waiting for just that.
-- Goes on until it has what was asked for, or a round changed nothing: a round may meet only tasks that expired, lanes whose tasks were
-- cancelled, or a schedule that it hears of when it is due already. A call does eight rounds at most, and so a bounded amount of hearing and parking: the next one goes on.
-- A paused queue gives nothing; one with a cap, rate or breaker of its own, or of the cluster, asks the meters first.
-- Locks: #meters where there are any; the domain while promoting; ready, the rows it takes; the worker's row, shared, once it has tasks.
-- Cost: p_limit entries of ready_order_idx plus those popped since the last tick.
create function fairq._pop(
  p_shard_no integer, p_queue text, p_limit integer, p_worker_id bigint, p_claim_lease interval, p_may_wait boolean
) returns setof fairq.popped
language plpgsql set search_path = '' as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_left integer := p_limit;
  v_meters integer := 0;
  v_before fairq.ticks;
  v_promoted integer;
  v_goes_on boolean;
  v_popped fairq.placed[];
  v_ready tid[];
  v_held integer;
  v_has_news boolean;
  v_waited boolean := false;
  v_rounds integer := 0;
  v_used_up bigint;
begin
  perform fairq._touch_worker(p_shard_no, p_worker_id, v_now);
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.paused_at is not null then
    return;
  end if;
  if v_queue.metered then
    v_left := fairq._meter(p_queue, p_limit, v_now, p_claim_lease);
    p_limit := v_left;
    v_meters := fairq._meters_of(p_queue);
    if v_left < 1 then
      return;
    end if;
  end if;

  for v_round in 1 .. 1000 loop
    select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    v_before := v_tick;
    v_promoted := null;
    v_popped := null;
    v_has_news := v_tick.tick is null or fairq._has_news(v_tick);
    if v_round > 1 or v_has_news then
      select m.o_promoted, m.o_popped, m.o_goes_on into v_promoted, v_popped, v_goes_on
      from fairq._promote(p_shard_no, p_queue, fairq._ready_target(p_shard_no, v_queue, p_worker_id, v_left), false, v_used_up, v_left) m;
      select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    end if;
    if v_promoted is null then
      v_popped := fairq._pick(v_tick, v_left, true);
    end if;

    v_held := 0;
    if v_popped <> '{}' then
      if v_left = p_limit then
        perform fairq._hold_worker(p_shard_no, p_worker_id);
      end if;
      v_ready := array(select p.ready from unnest(v_popped) p where p.ready is not null);
      if v_ready <> '{}' then
        perform fairq._remove(p_shard_no, 'ready', v_ready);
      end if;
      return query select h.* from fairq._hold(p_shard_no, v_popped, p_worker_id, p_claim_lease, v_now, v_meters) h;
      get diagnostics v_held = row_count;
      v_left := v_left - v_held;
      if v_held < cardinality(v_popped) then
        perform fairq._leave(p_shard_no, fairq._find_late(p_shard_no, v_popped, v_now), v_now);
      end if;
    end if;

    exit when v_left = 0;
    v_used_up := v_tick.tick;
    v_has_news := v_tick.tick is null or fairq._has_news(v_tick);
    if v_promoted is null and v_left = p_limit and v_popped = '{}' and p_may_wait and not v_waited and (v_round > 1 or v_has_news) then
      -- Somebody else promotes, and there is nothing else to do: that takes milliseconds. Then look again.
      v_waited := true;
      continue when fairq._await_domain(p_shard_no, p_queue);
    end if;
    -- Nothing waits any more: what was taken was all there was. Where some of it had expired there may be more behind it.
    exit when v_tick.horizon is null and v_held = cardinality(v_popped) and not v_has_news;
    -- Those that only met tasks that had expired are not counted: nobody is hidden behind them.
    v_rounds := v_rounds + case when v_held = cardinality(v_popped) then 1 else 0 end;
    exit when v_rounds >= 8;
    -- Somebody else promotes, or the news is none that a promotion can act on (a due task that another transaction holds).
    exit when v_round > 1 and v_popped = '{}'
      and (v_promoted is null or v_promoted = 0 and not v_goes_on and v_tick.horizon is not distinct from v_before.horizon
        and v_tick.horizon_position is not distinct from v_before.horizon_position and v_tick.next_xid = v_before.next_xid
        and v_tick.pending = v_before.pending and v_tick.touched = v_before.touched
        and v_tick.next_due_at is not distinct from v_before.next_due_at);
  end loop;
  if v_queue.metered and v_left < p_limit then
    perform fairq._charge_meters(p_queue, p_limit - v_left, v_now);
  end if;
end;
$$;

-- Gives tasks to a worker, which are in the ready set no more, or never were. A task whose deadline passed is left out.
-- Returns the tasks in served order.
-- Locks: none; nobody else can have them.
-- Cost: one step in tasks_pkey per task.
create function fairq._hold(p_shard_no integer, p_tasks fairq.placed[], p_worker_id bigint, p_claim_lease interval, p_now timestamptz, p_meters integer)
returns setof fairq.popped
language plpgsql rows 100 set search_path = '' as $$
begin
  return query
    with task as materialized (
      select b.id, b.attempt + 1 as attempt, b.max_attempts, b.queue, b.group_key, b.kind, b.priority, b.cost, b.created_at, b.run_at, b.expires_at, b.timeout,
        b.idempotency_key, b.concurrency_key, b.headers, b.payload, p.block, p.position, p.charge, p.counted, p.keyed
      from unnest(p_tasks) p
      cross join lateral (
        -- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
        select t.*
        from fairq.tasks t
        where t.shard_no = p_shard_no and t.id = p.id
        offset 0
      ) b
      where b.expires_at is null
        or b.expires_at > p_now
    ),
    held as (
      insert into fairq.held (shard_no, id, worker_id, attempt, started_at, lease_expires_at, charge, meters, counted, keyed)
      select p_shard_no, t.id, p_worker_id, t.attempt, case when p_claim_lease is null then p_now end, p_now + p_claim_lease, t.charge, p_meters,
        t.counted, t.keyed
      from task t
    )
    select p_shard_no, t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind, t.priority, t.cost, t.created_at, t.run_at, t.expires_at,
      case when p_claim_lease is null then p_now end, p_now + p_claim_lease, t.timeout, t.idempotency_key, t.concurrency_key, t.headers, t.payload,
      t.block, t.position
    from task t;
end;
$$;

-- Those of popped tasks whose deadline passed, with what they hold.
create function fairq._find_late(p_shard_no integer, p_tasks fairq.placed[], p_now timestamptz) returns fairq.leaving[]
language plpgsql stable set search_path = '' as $$
begin
  return (
    select array_agg((b.id, b.ctid, null, null, null, 'expired', null, null, null, null, null, null, p.charge, 0, p.counted, p.keyed)::fairq.leaving)
    from unnest(p_tasks) p
    cross join lateral (
      select t.id, t.ctid
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = p.id and t.expires_at <= p_now
      offset 0
    ) b
  );
end;
$$;

-- How many tasks a pass makes ready beside those it hands over. A task that is handed over is written once less than one that becomes ready
-- first, so what a single worker needs is not kept ready; but a pass costs the same for one task as for many, so it is worth two hundred, and other
-- workers should find something without waiting: twice what they can run.
-- Where groups share time, fifty: what is ready was charged by an estimate that may be wrong.
create function fairq._ready_target(p_shard_no integer, p_queue fairq.queues, p_worker_id bigint default null, p_take integer default 0) returns integer
language plpgsql stable set search_path = '' as $$
begin
  return coalesce(p_queue.ready_target, greatest(
    case when p_queue.fairness = 'time' then 50 when p_worker_id is null then 1000 else 200 end - p_take,
    (
      select 2 * least(coalesce(sum(w.slots), 0), 500000)
      from fairq.workers w
      where w.shard_no = p_shard_no
        and w.worker_id is distinct from p_worker_id
        and p_queue.queue = any(w.queues)
    )
  ))::integer;
end;
$$;
