-- A worker's whole turn in one statement: what ended is written, what was claimed starts, and the next tasks of the worker's queues come back; when there are
-- fewer than asked for, also the time to look again. Either all of it happens or nothing.
-- p_queues and p_mosts list, step by step, which queue to ask for how many tasks. A queue may be asked again for what others left over, unless it gave less
-- than it was asked for: then it has no more. p_limit is the most over all; 0: only write.
-- Returns the tasks, and after them one row with the ids that were accepted (see finish_tasks, start_tasks) and the seconds until something is due. Tasks with
-- losses are only claimed, whatever p_claim_lease says, see pop_tasks. A turn that finds nothing and writes nothing leaves no trace, not even a transaction id.
-- Raises what pop_tasks, finish_tasks and start_tasks raise. Locks: as these do, in the order in which they are named.
create function fairq.turn(
  p_worker_id bigint, p_queues text[], p_mosts integer[], p_limit integer, p_claim_lease interval default null, p_ended_ids bigint[] default '{}',
  p_ended_attempts integer[] default '{}', p_outcomes text[] default null, p_results jsonb[] default null, p_errors jsonb[] default null,
  p_retry_delays interval[] default null, p_costs double precision[] default null, p_holds text[] default null,
  p_started_ids bigint[] default '{}', p_started_attempts integer[] default '{}'
) returns setof fairq.turned
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_answer fairq.turned;
  v_left integer := p_limit;
  v_most integer;
  v_popped integer;
  v_empty text[] := array[]::text[];
  v_next record;
  v_scope text;
  v_was_full boolean := false;
begin
  -- The order of locks: meters come before any domain or keys, and a queue without meters may be asked before one with them.
  if p_limit > 0 and exists (select from fairq.queues q where q.queue = any(p_queues) and q.metered) then
    for v_scope in
      select distinct m.scope
      from fairq.queues q
      cross join lateral fairq._meters(q.queue) m
      where q.queue = any(p_queues) and q.metered and fairq._is_worth_asking(q.queue, fairq._now())
      order by m.scope
    loop
      perform fairq._lock_counters(0, '#' || v_scope, false);
    end loop;
    v_was_full := fairq._is_cluster_full(fairq._now());
  end if;
  if p_ended_ids <> '{}' then
    v_answer.ended := array(
      select f.* from fairq.finish_tasks(p_worker_id, p_ended_ids, p_ended_attempts, p_outcomes, p_results, p_errors, p_retry_delays,
        p_costs, p_holds) f
    );
  end if;
  if p_started_ids <> '{}' then
    v_answer.started := array(select s.* from fairq.start_tasks(p_worker_id, p_started_ids, p_started_attempts) s);
  end if;

  for v_step in 1 .. coalesce(cardinality(p_queues), 0) loop
    v_most := least(p_mosts[v_step], v_left);
    exit when v_left < 1;
    continue when p_queues[v_step] = any(v_empty);
    return query
      select null::bigint[], null::bigint[], null::double precision, t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind,
        t.started_at, t.timeout, t.headers, t.payload, t.spared, t.losses, t.user_key
      from fairq.pop_tasks(p_queues[v_step], v_most, p_worker_id, p_claim_lease, p_isolate => true) t;
    get diagnostics v_popped = row_count;
    v_left := v_left - v_popped;
    if v_popped < v_most then v_empty := v_empty || p_queues[v_step]; end if;
  end loop;

  if v_left > 0 then
    select min(case
        when q.metered then fairq.next_due_at(q.queue)
        else least(k.next_due_at, case when k.keyed then (select y.next_due_at from fairq._tick(s.shard_no, '#keys') y) end)
      end) as due_at,
      bool_or(fairq._has_news(k) or fairq._lets_long(k, fairq._now()) or (k.horizon is not null and not q.metered)) as has_more
    into v_next
    from fairq.queues q
    cross join fairq._shards(null) s(shard_no)
    cross join lateral fairq._tick(s.shard_no, q.queue) k
    where q.queue = any(p_queues) and q.paused_at is null;
    v_answer.due_in := extract(epoch from v_next.due_at - fairq._now())::double precision;
    -- One call hears and parks a bounded amount, and another session may be promoting: then there is soon more to look at. The same holds where the horizon
    -- stands before a lane that this call did not get to.
    if v_next.has_more then v_answer.due_in := least(v_answer.due_in, 0.02); end if;
    if v_was_full then
      -- This worker has no use for the places of the cluster that it freed. Workers of other queues may wait for them, and sleep.
      perform pg_notify('fairq', q.queue) from fairq.queues q
      where q.notify and q.metered and q.paused_at is null and q.queue <> all(p_queues) and fairq._is_worth_asking(q.queue, fairq._now());
    end if;
  end if;
  return next v_answer;
end;
$$;
comment on function fairq.turn is 'A worker''s whole turn: writes what ended, starts, and hands out the next tasks.';
