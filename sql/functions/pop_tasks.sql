-- Takes the next tasks of a queue in served order and hands them to a worker, which finishes, releases or loses each of them. Alone enough for a
-- consumer in any language: it promotes by itself when it has to.
-- With p_claim_lease the tasks are claimed, not running: they must be started (start_tasks) before the lease ends, or others get them.
-- Returns the tasks, at most p_limit, in served order; no row when there is nothing to do.
-- Raises QF003 unknown queue, QF004 unknown worker, QF005 not READ COMMITTED, QF007 bad limit, QF009 bad lease, QF015 claim leases under a cap of
-- the cluster.
-- Locks: the tasks it returns; the domain when it promotes. Commit before working on the tasks.
create function fairq.pop_tasks(
  p_queue text,
  p_limit integer,
  p_worker_id bigint,
  p_claim_lease interval default null,
  p_shard_no integer default null
) returns setof fairq.tasks
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
  v_left integer := p_limit;
  v_popped integer;
  v_first integer := floor(random() * 4096)::integer;
  v_may_wait boolean := true;
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation(p_queue);
  if p_claim_lease <= interval '0' or not fairq._is_span(p_claim_lease, '366 days') then
    raise exception 'the claim lease % is out of range', p_claim_lease
      using errcode = 'QF009', hint = 'More than nothing, at most 366 days; leave it null to start the tasks at once.';
  end if;
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
comment on function fairq.pop_tasks(text, integer, bigint, interval, integer) is
  'Hands the next tasks of a queue to a worker, in served order.';
