-- Hands the next tasks of a queue to a worker, in served order. The worker finishes, releases or loses each of them. This is all that a consumer in any
-- language needs: a pop promotes by itself when it has to.
-- With p_claim_lease the tasks are claimed, not running: the worker must start them (start_tasks) before the lease ends, or others get them.
-- With p_isolate, tasks that were lost with a worker before (losses) are only claimed, and their claim has no lease. The worker must start each of them alone,
-- with nothing else in flight. Without p_isolate they come like all others, and the caller should run them alone.
-- A paused queue gives nothing. A queue with a cap, rate or breaker of its own asks the meters first; so does every queue when the cluster has a cap.
-- Returns at most p_limit tasks, in served order. It returns no row, and writes nothing, when there is nothing to do.
-- Raises QF003 unknown queue, 42501 the queue or the worker is another role's, QF004 unknown worker, QF005 not READ COMMITTED, QF007 bad limit, QF009 bad
-- lease, QF015 claim leases under a cap of the cluster.
-- Locks: the meters of the queue where there are any; then as _take. Commit before you work on the tasks.
create function fairq.pop_tasks(
  p_queue text, p_limit integer, p_worker_id bigint, p_claim_lease interval default null, p_shard_no integer default null,
  p_isolate boolean default false
) returns setof fairq.popped
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues;
  v_shards integer[] := array[coalesce(p_shard_no, 0)];
  v_shard_no integer;
  v_floor bigint;
  v_may_wait boolean := true;
  v_left integer := p_limit;
  v_meters integer := 0;
  v_scopes text[] := array[]::text[];
  v_taken fairq.placed[];
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation(p_queue);
  perform fairq._check_length('the claim lease', p_claim_lease, interval '366 days');
  v_queue := fairq._queue(p_queue);
  if v_queue.work_role is not null then perform fairq._check_role(p_queue, v_queue.work_role); end if;
  if p_shard_no is null and v_queue.spread then
    select s.o_shards, s.o_floor, s.o_may_wait into v_shards, v_floor, v_may_wait from fairq._standings(p_queue) s;
  end if;

  foreach v_shard_no in array v_shards loop
    perform fairq._touch_worker(v_shard_no, p_worker_id, v_now);
    continue when v_queue.paused_at is not null;
    if v_queue.metered then
      exit when not fairq._is_worth_asking(p_queue, v_now);
      select m.o_most, m.o_scopes, m.o_meters into v_left, v_scopes, v_meters from fairq._meter(p_queue, v_left, v_now, p_claim_lease) m;
      -- Read again: the call may have waited for the meters.
      select q.* into v_queue from fairq.queues q where q.queue = p_queue;
      exit when v_queue.paused_at is not null;
    end if;
    exit when v_left < 1;

    v_taken := fairq._take(v_shard_no, v_queue, v_left, p_worker_id, p_claim_lease, v_meters, v_floor, v_may_wait, p_isolate, v_now);
    v_may_wait := false;
    continue when v_taken = '{}';
    v_left := v_left - cardinality(v_taken);
    if v_scopes <> '{}' then
      perform fairq._take_place(0, '#' || s.scope, s.scope, v_now, cardinality(v_taken)) from unnest(v_scopes) s(scope);
    end if;
    return query
      select v_shard_no, p.id, p.attempt, b.max_attempts, p_queue, p.group_key, b.kind, b.priority, b.cost, b.created_at, b.run_at, b.expires_at,
        case when p_claim_lease is null and (b.losses is null or not p_isolate) then v_now end,
        case when b.losses is null or not p_isolate then v_now + p_claim_lease end, b.timeout,
        b.idempotency_key, b.concurrency_key, b.headers, b.payload, p.block, p.position, b.spared, b.losses, nullif(b.user_key, '')
      from unnest(v_taken) p
      cross join lateral fairq._body(v_shard_no, p.id) b;
  end loop;
end;
$$;
comment on function fairq.pop_tasks is 'Hands the next tasks of a queue to a worker, in served order.';

-- The shards of a queue in the order in which a pop asks them: the one that has come least far is first. So groups have the same share whatever the number of
-- others in their shards. In random order a group alone in its shard would get as much as all groups of another shard together. A shard with nothing left goes
-- on from o_floor, where the hindmost of the others stands (see _move_clock), and is asked first when there is news of it.
-- o_may_wait: whether this pop may wait for another session's promotion. It may in the first shard only, so that it never waits while it holds a domain or
-- tasks of another shard; and only if no other shard has anything.
-- Cost: for each shard one entry of ticks_pkey, and one of ready_order_idx plus those popped since the last tick.
create function fairq._standings(p_queue text, out o_shards integer[], out o_floor bigint, out o_may_wait boolean)
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  with standing as materialized (
    select s.shard_no, coalesce(r.block, k.horizon) as block,
      coalesce(r.block, k.horizon) is null and (k.tick is null or fairq._has_news(k)) as has_news
    from fairq._shards(null) s(shard_no)
    left join lateral fairq._tick(s.shard_no, p_queue) k on true
    left join lateral (
      select y.block from fairq.ready y
      where y.shard_no = s.shard_no and y.queue = p_queue and y.position >= 0 and (y.block, y.position) >= (k.clock, k.clock_position)
      order by y.block, y.position limit 1
    ) r on true
  ),
  placed as (
    select s.shard_no, s.block, s.has_news, fairq._ahead(s.block, (select max(t.block) from standing t)) as ahead from standing s
  )
  select array_agg(p.shard_no order by p.has_news desc, p.ahead, random()), (array_agg(p.block order by p.ahead))[1],
    count(*) filter (where p.has_news or p.block is not null) <= 1
  into o_shards, o_floor, o_may_wait
  from placed p;
end;
$$;

-- Takes tasks from one domain for a worker. As long as there is no news and enough is ready before the horizon, it takes these tasks as they are. Otherwise
-- this pop promotes, and the promotion hands over what the pop needs.
-- If another session holds the domain's lock, that session is promoting. This one waits for it, briefly, only when there is nothing else to do. p_may_wait says
-- that this call holds nothing in another shard yet: a session that promotes all shards in order may be waiting for just that.
-- It goes on until it has p_limit tasks, or until a round changed nothing: a round may meet only expired tasks, lanes whose tasks were cancelled, or a schedule
-- that it hears of when it is already due. A call makes at most eight rounds, so the work of hearing and parking is bounded; the next call goes on.
-- Locks: the domain while promoting; ready, the rows it takes; the worker's row, shared, once it has tasks.
-- Cost: p_limit entries of ready_order_idx plus those popped since the last tick.
create function fairq._take(
  p_shard_no integer, p_queue fairq.queues, p_limit integer, p_worker_id bigint, p_claim_lease interval, p_meters integer, p_floor bigint, p_may_wait boolean,
  p_isolate boolean, p_now timestamptz
) returns fairq.placed[]
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_taken fairq.placed[] := array[]::fairq.placed[];
  v_left integer := p_limit;
  v_tick fairq.ticks;
  v_has_news boolean;
  v_popped fairq.placed[];
  v_promoted integer;
  v_goes_on boolean;
  v_is_late boolean := false;
  v_after timestamptz;
  v_again bigint[];
  v_ready tid[];
  v_used_up bigint;
  v_waited boolean := false;
  v_rounds integer := 0;
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue.queue) k;
  v_has_news := v_tick.tick is null or fairq._has_news(v_tick) or fairq._lets_long(v_tick, p_now);
  loop
    v_promoted := null;
    if v_rounds > 0 or v_has_news then
      select m.o_promoted, m.o_popped, m.o_goes_on, m.o_tick into v_promoted, v_popped, v_goes_on, v_used_up
      from fairq._promote(p_shard_no, p_queue.queue, fairq._ready_target(p_shard_no, p_queue, p_worker_id, v_left), false, v_used_up, v_left, p_floor) m;
    end if;
    if v_promoted is null then
      v_popped := fairq._pick(v_tick, v_left, true, v_after);
      v_used_up := v_tick.tick;
    end if;

    v_is_late := false;
    if v_popped <> '{}' then
      if v_taken = '{}' then
        -- Until the transaction ends nobody gives this worker up. Between a pop and its commit that would leave the tasks with nobody.
        perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id and w.lost_at is null for key share;
        if not found then perform fairq._refuse_worker(p_worker_id); end if;
      end if;
      -- A deadline may pass while a task is ready: such a task is late, and left to promotion, see _ring_late. Tasks that promotion just handed over are not
      -- judged again: by a clock that was set back since they might be late, and they are not ready.
      -- Nearly all tasks are at their first attempt; only the others may have been lost before.
      select coalesce(bool_or(p.expires_at <= p_now and p.ready is not null), false), array_agg(p.id) filter (where p.attempt > 1),
        array_agg(p.ready) filter (where (p.expires_at <= p_now) is not true)
      into v_is_late, v_again, v_ready
      from unnest(v_popped) p;
      if v_is_late then
        v_after := p_now;
        perform fairq._ring_late(v_tick, p_now);
        v_popped := array(select p from unnest(v_popped) p where (p.expires_at <= p_now and p.ready is not null) is not true);
      end if;
      if p_isolate and v_again is not null then
        v_again := array(
          select t.id
          from unnest(v_again) i(id)
          cross join lateral fairq._body(p_shard_no, i.id) t
          where t.losses is not null
        );
      end if;
      perform fairq._hold(p_shard_no, v_popped, v_ready, p_worker_id, p_claim_lease, p_meters, case when p_isolate then coalesce(v_again, '{}') else '{}' end, p_now);
      v_taken := v_taken || v_popped;
      v_left := p_limit - cardinality(v_taken);
    end if;
    -- There was nothing to begin with. A pop that finds nothing looks once.
    exit when v_left = 0 or (v_promoted is null and v_popped = '{}' and not v_is_late and v_tick.horizon is null and not v_has_news);

    select k.* into v_tick from fairq._tick(p_shard_no, p_queue.queue) k;
    v_has_news := v_tick.tick is null or fairq._has_news(v_tick) or fairq._lets_long(v_tick, p_now);
    v_rounds := v_rounds + 1;
    if v_promoted is null and v_taken = '{}' and v_after is null and p_may_wait and not v_waited and (v_rounds > 1 or v_has_news) then
      -- Another session promotes, and there is nothing else to do. That takes milliseconds; then look again.
      v_waited := true;
      continue when fairq._await_domain(p_shard_no, p_queue.queue);
    end if;
    -- Nothing waits any more: all there was is taken.
    exit when v_tick.horizon is null and not v_is_late and not v_has_news;
    -- Another session promotes, or no promotion can act on the news (as on a due task that another transaction has locked).
    exit when v_rounds >= 8 or (v_rounds > 1 and v_popped = '{}' and not v_is_late and (v_promoted is null or not v_goes_on));
  end loop;
  return v_taken;
end;
$$;

-- From here on the worker has these tasks, and they are no longer ready. p_suspects are only claimed, without a lease. By ctid and no other way, see _leave.
create function fairq._hold(
  p_shard_no integer, p_tasks fairq.placed[], p_ready tid[], p_worker_id bigint, p_claim_lease interval, p_meters integer, p_suspects bigint[], p_now timestamptz
) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
begin
  with unready as (
    delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(p_ready)
  )
  insert into fairq.held (shard_no, id, worker_id, attempt, started_at, lease_expires_at, charge, meters, counted, user_counted, keyed)
  select p_shard_no, p.id, p_worker_id, p.attempt, case when p_claim_lease is null and p.id <> all(p_suspects) then p_now end,
    case when p.id <> all(p_suspects) then p_now + p_claim_lease end, p.charge, p_meters + case when p.long then 4 else 0 end, p.counted, p.user_counted, p.keyed
  from unnest(p_tasks) p;
end;
$$;

-- How many tasks a pass makes ready beside those it hands over. A task that is handed over is written once less than one that first becomes ready, so nothing
-- is kept ready for a single worker alone. But a pass costs the same for one task as for many, so two hundred are worth it, and other workers should find
-- something without waiting: twice what they can run, four thousand at most.
-- Where groups share what tasks use it is fifty: ready tasks were charged by an estimate that may be wrong.
create function fairq._ready_target(p_shard_no integer, p_queue fairq.queues, p_worker_id bigint default null, p_take integer default 0) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return coalesce(p_queue.ready_target, greatest(
    case when p_queue.fairness <> 'count' then 50 when p_worker_id is null then 1000 else 200 end - p_take,
    (
      select least(2 * coalesce(sum(w.slots), 0), 4000) from fairq.workers w
      where w.shard_no = p_shard_no and w.lost_at is null
        and w.worker_id is distinct from p_worker_id and p_queue.queue = any(w.queues)
    )
  ))::integer;
end;
$$;
