-- Pops from one domain. Reads the ready index from the clock up to the horizon, in served order, and takes what nobody else is taking.
-- A row that another session pops is skipped; one that another session popped after our snapshot fails the recheck of its state and is
-- skipped too; one whose popper rolls back becomes visible again at the same address.
-- Promotes when there is news, when the ready set runs short, and, for the next caller, when this pop passed the middle of it.
-- Another session that holds the domain's lock is promoting already; it is waited for only when there is nothing else to do, and not for long. p_may_wait
-- says that this call holds nothing in another shard yet: who promotes all shards in their order may be waiting for just that.
-- Goes on until it has what was asked for, or a round changed nothing: a round may meet only tasks that expired, lanes whose tasks were
-- cancelled, or a schedule that it hears of when it is due already. The bound on rounds is a matter of cost only; the next pop goes on.
-- A paused queue gives nothing; one with a cap, rate or breaker of its own, or of the cluster, asks the meters first.
-- Locks: the worker's row, shared; #meters where there are any; tasks, the rows it returns; the domain while promoting.
-- Cost: p_limit entries of tasks_ready_idx plus those popped since the last tick.
create function fairq._pop(
  p_shard_no integer,
  p_queue text,
  p_limit integer,
  p_worker_id bigint,
  p_claim_lease interval,
  p_may_wait boolean
) returns setof fairq.tasks
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_left integer := p_limit;
  v_picked record;
  v_meters integer := 0;
  v_before fairq.ticks;
  v_promoted integer;
  v_waited boolean := false;
  v_used_up bigint;
begin
  perform fairq._touch_worker(p_shard_no, p_worker_id, v_now, true);
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

  for v_round in 1 .. 100 loop
    select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    v_before := v_tick;
    v_promoted := null;
    if v_round > 1 or v_tick.tick is null or fairq._has_news(v_tick) then
      v_promoted := fairq._promote(p_shard_no, p_queue, greatest(p_limit, fairq._ready_target(p_shard_no, v_queue)), false, v_used_up);
      select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    end if;

    select array_agg(n.ctid) filter (where not n.is_expired) as ready, array_agg(n.ctid) filter (where n.is_expired) as expired,
      max(array[n.block, n.position]) as last_address
    into v_picked
    from (
      select t.ctid, t.block, t.position, t.expires_at is not null and t.expires_at <= v_now as is_expired
      from fairq.tasks t
      where t.shard_no = p_shard_no
        and t.queue = p_queue
        and t.state = 'queued'
        and (t.block, t.position) >= (v_tick.clock, v_tick.clock_position)
        and (t.block, t.position) < (coalesce(v_tick.horizon, 9223372036854775807), coalesce(v_tick.horizon_position, 0))
      order by t.block, t.position
      limit v_left
      for update skip locked
    ) n;

    if v_picked.expired is not null then
      perform fairq._end_tasks(p_shard_no, v_picked.expired, 'expired', null, v_now);
    end if;
    if v_picked.ready is not null then
      return query select h.* from fairq._hold(p_shard_no, v_picked.ready, p_worker_id, p_claim_lease, v_now, v_meters) h;
      v_left := v_left - cardinality(v_picked.ready);
    end if;

    exit when v_left = 0;
    v_used_up := v_tick.tick;
    if v_promoted is null and v_left = p_limit and v_picked.expired is null and p_may_wait and not v_waited
      and (v_round > 1 or v_tick.tick is null or fairq._has_news(v_tick))
    then
      -- Somebody else promotes, and there is nothing else to do: that takes milliseconds. Then look again. Not with tasks in hand: who holds
      -- the domain to set a first cap waits for those.
      v_waited := true;
      continue when fairq._await_domain(p_shard_no, p_queue);
    end if;
    exit when v_tick.horizon is null and v_picked.expired is null and not fairq._has_news(v_tick);
    -- Somebody else promotes, or the news is none that a promotion can act on (a due task that another transaction holds).
    exit when v_round > 1 and v_picked.ready is null and v_picked.expired is null
      and (v_promoted is null or v_promoted = 0 and v_tick.horizon is null and v_tick.next_xid = v_before.next_xid
        and v_tick.next_due_at is not distinct from v_before.next_due_at);
  end loop;
  if v_queue.metered and v_left < p_limit then
    perform fairq._charge_meters(p_queue, p_limit - v_left, v_now);
  end if;

  if v_left = 0 and v_tick.horizon is not null and v_picked.last_address >= array[v_tick.refill_block, v_tick.refill_position] then
    perform fairq._promote(p_shard_no, p_queue, fairq._ready_target(p_shard_no, v_queue), false);
  end if;
end;
$$;
comment on function fairq._pop(integer, text, integer, bigint, interval, boolean) is 'Pops from one domain.';
