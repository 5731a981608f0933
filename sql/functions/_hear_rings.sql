-- Takes the rings that committed since the last tick and returns what they say: the lanes they touch, as they are now.
--
-- Exactly once, without deleting or marking a ring: a ring is new when its transaction is at or past the last tick's next_xid, or
-- was pending then, and the row is visible now. What is visible and what is stored for the next tick come from the snapshot of one
-- statement: two snapshots would hear a ring twice or never, and a ring that tells of freed places may not be heard twice.
--
-- The own transaction is a case of its own: no snapshot lists it as pending, and its id may lie above or below the snapshot's xmax. Its
-- rings are heard up to here (a task may be created, promoted and popped in one transaction), the tick says up to which ring,
-- and it is stored as pending: what it rings later is heard by the next tick, its own or another's.
--
-- When more rings wait than p_limit, the pass stops at a transaction id: later ones are left for the next pass.
-- Locks: lanes, rows it replaces; the caller holds the domain.
-- Cost: new rings, one lane each; rings_xid_idx and lanes_pkey.
create function fairq._hear_rings(
  p_tick fairq.ticks,
  p_queue fairq.queues,
  p_limit integer,
  p_now timestamptz,
  out o_next_xid xid8,
  out o_pending xid8[],
  out o_heard_ring bigint,
  out o_next_due_at timestamptz,
  out o_cancelled bigint[],
  out o_lane_count bigint,
  out o_newcomer_position bigint,
  out o_lanes fairq.lanes[]
)
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_own xid8 := pg_current_xact_id();
  v_snapshot pg_snapshot;
  v_last xid8;
  v_replaced tid[];
  -- Whether every group of the queue has limits; otherwise only those with settings of their own may have any.
  v_limited boolean := coalesce(p_queue.group_max_running, p_queue.group_rate_limit, p_queue.group_breaker_threshold) is not null;
begin
  -- Behind the transaction that promoted last: only the last tick knows which of its rings were heard.
  select r.xid into v_last
  from fairq.rings r
  where r.shard_no = p_tick.shard_no
    and r.queue = p_tick.queue
    and r.xid >= p_tick.next_xid
    and r.xid > p_tick.heard_xid
  order by r.xid
  offset p_limit
  limit 1;

  with ring as materialized (
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid >= p_tick.next_xid
      and r.xid < p_tick.heard_xid
    union all
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid >= p_tick.next_xid
      and r.xid > p_tick.heard_xid
      and r.xid <= coalesce(v_last, '18446744073709551615')
    union all
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid = p_tick.heard_xid
      and r.ring_id > p_tick.heard_ring
    union all
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from unnest(p_tick.pending) p(xid)
    cross join lateral (
      -- One look-up per transaction: the planner takes "= any" for a filter, and reads all rings there are. "offset 0" keeps it from joining.
      select w.xid, w.ring_id, w.group_key, w.priority, w.sequence, w.freed, w.failures, w.succeeded, w.keyed, w.due_at, w.cancelled_id, w.correction, w.ran
      from fairq.rings w
      where w.shard_no = p_tick.shard_no
        and w.queue = p_tick.queue
        and w.xid = p.xid
      offset 0
    ) r
    where p.xid <> p_tick.heard_xid
  ),
  news as materialized (
    select r.group_key, sum(r.freed)::integer as freed, min(r.sequence) as first_sequence, bool_or(r.keyed) as keyed,
      bool_or(r.succeeded) as succeeded, coalesce(sum(r.failures) filter (where r.ring_id >= r.last_success), 0)::integer as failures,
      array_agg((r.priority, r.sequence)::fairq.cursor) filter (where r.sequence is not null) as heard,
      sum(r.correction) as correction, array_agg(r.ran) filter (where (r.ran).kind is not null) as ran
    from (
      select g.*, coalesce(max(g.ring_id) filter (where g.succeeded) over (partition by g.group_key), 0) as last_success
      from ring g
      where g.due_at is null
    ) r
    group by r.group_key
  ),
  lane as materialized (
    select n.group_key, n.first_sequence, n.heard, n.keyed or coalesce(l.keyed, false) as keyed,
      l.ctid as replaces, l.version, l.lane_no, l.position, l.last_priority,
      coalesce(c.finish, l.finish) as finish,
      c.pace as pace,
      n.correction is not null as is_corrected,
      l.cursors is null or l.cursors = '{}' as was_idle,
      -- Per priority the smaller sequence, highest priority first.
      case
        when n.heard is null then coalesce(l.cursors, '{}')
        when cardinality(n.heard) = 1 and coalesce(l.cursors, '{}') = '{}' then n.heard
        else array(
          select (u.priority, min(u.sequence))::fairq.cursor
          from unnest(l.cursors || n.heard) u
          group by u.priority
          order by u.priority desc
        )
      end as cursors,
      coalesce((g.settings).weight, p_queue.weight) as weight,
      g.policy,
      case
        when g.policy is distinct from null or l.gate is distinct from null
          then fairq._settle(g.policy, l.gate, n.freed, n.failures, n.succeeded, p_now)
      end as gate
    from news n
    left join lateral (
      select v.ctid, v.version, v.lane_no, v.finish, v.position, v.keyed, v.gate, v.pace, v.last_priority, v.cursors
      from fairq.lanes v
      where v.shard_no = p_tick.shard_no
        and v.queue = p_tick.queue
        and v.group_key = n.group_key
      order by v.version desc
      limit 1
    ) l on true
    cross join lateral (
      select s as settings, case when s.queue is not null or v_limited then fairq._policy(p_queue, s) end as policy
      from (values (1)) one
      left join lateral (
        select c.*
        from fairq.groups c
        where c.shard_no = p_tick.shard_no
          and c.queue = p_tick.queue
          and c.group_key = n.group_key
        offset 0
      ) s on true
      offset 0
    ) g
    left join lateral (
      select x.finish, x.pace
      -- "offset 0" makes this a gate before the call, not a filter behind it: queues that count pay nothing.
      from (select where p_queue.fairness = 'time' offset 0) gate
      cross join lateral fairq._correct(l.finish, l.pace, n.correction, n.ran, coalesce((g.settings).weight, p_queue.weight), p_tick.clock,
        coalesce(l.cursors, '{}') = '{}' and n.first_sequence is null) x
    ) c on true
  ),
  numbered as (
    select l.group_key, l.replaces, l.heard, l.first_sequence, l.cursors, l.weight, l.keyed, l.policy, l.gate, l.pace, l.is_corrected,
      case when l.policy is distinct from null then fairq._allowance(l.policy, l.gate, p_now) end as allowance,
      coalesce(l.version, 0) as version,
      coalesce(l.lane_no, p_tick.lane_count + row_number() over (partition by l.lane_no is null order by l.first_sequence)) as lane_no,
      coalesce(l.finish, 0) as finish,
      coalesce(l.last_priority, 0) as last_priority,
      l.position,
      l.was_idle,
      -- A group that was idle, and has used up its last turn, comes at once: before the lane that is next, behind the newcomers before it.
      case
        when l.was_idle and coalesce(l.finish, 0) <= p_tick.clock and l.first_sequence is not null
          then least(
            p_tick.newcomer_position + row_number() over (
              partition by l.was_idle and coalesce(l.finish, 0) <= p_tick.clock and l.first_sequence is not null
              -- Groups that wait for the same concurrency key are idle until it is free: they take turns.
              order by case when l.keyed then coalesce(l.finish, 0) else 0 end, l.first_sequence),
            fairq._gap_end(p_tick.clock_position))
      end as newcomer_position
    from lane l
  ),
  told as (
    -- Nobody starts before the clock. A group that waits keeps its place, whatever it adds.
    select n.replaces, n.lane_no, n.newcomer_position,
      (p_tick.shard_no, n.last_priority, n.lane_no, n.version, greatest(n.finish, p_tick.clock),
       case
         when n.newcomer_position is not null then n.newcomer_position
         when (n.finish, n.position) >= (p_tick.clock, p_tick.clock_position) and not n.was_idle and not n.is_corrected then n.position
         when n.finish > p_tick.clock then fairq._lane_position(n.lane_no)
         else greatest(fairq._lane_position(n.lane_no), p_tick.clock_position)
       end,
       n.weight,
       case when n.cursors <> '{}' then (n.allowance).look_at end,
       n.cursors <> '{}' and (n.policy is null or (n.allowance).tasks > 0),
       n.keyed, p_tick.queue, n.group_key, n.cursors, n.policy, n.gate, n.pace)::fairq.lanes as lane
    from numbered n
  )
  select pg_current_snapshot(),
    (select max(r.ring_id) from ring r where r.xid = v_own),
    (select least(p_tick.next_due_at, min(r.due_at)) from ring r),
    (select array_agg(r.cancelled_id) from ring r where r.cancelled_id is not null),
    greatest(p_tick.lane_count, max(t.lane_no)),
    greatest(p_tick.newcomer_position, max(t.newcomer_position)),
    coalesce(array_agg(t.lane), '{}'),
    array_agg(t.replaces) filter (where t.replaces is not null)
  into v_snapshot, o_heard_ring, o_next_due_at, o_cancelled, o_lane_count, o_newcomer_position, o_lanes, v_replaced
  from told t;

  -- Never past the snapshot's xmax: the own transaction may lie beyond it, and between the two others that nobody lists as pending.
  o_next_xid := least((v_last::text::bigint + 1)::text::xid8, pg_snapshot_xmax(v_snapshot));
  o_pending := array(
    select p.xid
    from (select pg_snapshot_xip(v_snapshot) union select v_own) p(xid)
    where p.xid < o_next_xid
  );
  o_heard_ring := coalesce(o_heard_ring, case when p_tick.heard_xid = v_own then p_tick.heard_ring end, 0);
  o_lane_count := coalesce(o_lane_count, p_tick.lane_count);
  o_newcomer_position := coalesce(o_newcomer_position, p_tick.newcomer_position);

  -- From here on these lanes live in o_lanes only, until admission writes their next versions.
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;
comment on function fairq._hear_rings(fairq.ticks, fairq.queues, integer, timestamptz) is
  'Consumes the rings that committed since the last tick, exactly once.';
