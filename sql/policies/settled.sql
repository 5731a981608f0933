-- Fair shares of what is known only when a task has ended: worker seconds (fairness = 'time'), or what its handler charges (fairness = 'cost'). Promotion
-- charges a task by an estimate, and the end of its attempt settles the difference.

-- What a task is expected to use: its cost, times what a unit of cost has used so far for its group and kind; at first the cost alone. So a cost may be
-- a size, a first guess, or a guess that is always wrong by the same factor. At most four times the mean: what is used beyond is settled exactly, but what was
-- charged too much comes back only behind the tasks in line. Without this bound, guesses wrong by ten times made shares of tokens differ by 7 %, not 1.
-- At most what one step can move a lane by, see _step.
create function fairq._expected(p_pace fairq.pace, p_kind text, p_cost double precision, p_weight double precision) returns double precision
language sql immutable parallel safe
as $$
  select least(1048576 * p_weight, coalesce((
    select least(4 * e.used, p_cost * e.used / e.cost) from unnest(p_pace.estimates) e where e.kind = p_kind
  ), p_cost))
$$;

-- What an attempt used. Seconds: at most an hour, so that an attempt that hangs does not banish its group; none when it never started. Cost: what its worker
-- says now (p_said), else what it last reported, else nothing for an attempt that never started or was given back to run again. Null otherwise: it ran and
-- said nothing, and counts as what was expected.
-- Cost: one step in progress_pkey, where costs are shared and the worker says nothing.
create function fairq._used(
  p_shard_no integer, p_queue text, p_id bigint, p_attempt integer, p_started_at timestamptz, p_outcome text, p_said double precision, p_now timestamptz
) returns double precision
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_reported double precision;
begin
  if (select q.fairness from fairq.queues q where q.queue = p_queue) <> 'cost' then
    return least(3600, greatest(0, coalesce(extract(epoch from p_now - p_started_at)::double precision, 0)));
  end if;
  if p_said is not null then return p_said; end if;
  select n.used into v_reported from fairq.progress n
  where n.shard_no = p_shard_no and n.task_id = p_id and n.attempt = p_attempt
  order by n.reported_at desc limit 1;
  return coalesce(v_reported, case when p_started_at is null or p_outcome in ('released', 'declined', 'postponed', 'lease_expired') then 0 end);
end;
$$;

-- Where a lane goes on, in a queue that shares what tasks use, after its attempts used p_correction more than they were charged (less, if negative).
-- An excess charge is given back as far as p_clock and the last address given out allow: tasks of a group keep their order. The rest becomes credit: the next
-- tasks lie up to twice as close together, see _spent. Without credit a group whose tasks differ, or that gives many back, would lose a little each time. Time
-- in which a group had nothing in line gives no credit. At the next correction at most 64 tasks' worth of credit still counts, about what is in flight and
-- ready, and none when the group has nothing waiting. Otherwise a group whose estimate was far too high would come with a flood. A lane goes at most 2^60 ahead
-- of the clock: the bound of one step does not bound all that was settled since the lane was served last.
-- Estimates and credit in another unit are dropped. What was charged in that unit is given back all the same, also when groups now share by count.
create function fairq._correct(
  p_finish bigint, p_pace fairq.pace, p_unit text, p_correction double precision, p_charged double precision, p_ran fairq.estimate[], p_weight double precision,
  p_clock bigint, p_was_idle boolean
) returns table (finish bigint, pace fairq.pace)
language plpgsql immutable rows 1 set search_path = pg_catalog, pg_temp as $$
declare
  v_due bigint;
  v_finish bigint;
  v_pace fairq.pace;
begin
  if p_pace.unit <> p_unit then
    p_pace.estimates := null;
    p_pace.credit := null;
  end if;
  if p_unit = 'count' then
    p_correction := null;
    p_ran := null;
  end if;
  v_due := least(p_clock + 1152921504606846976, coalesce(p_finish, p_clock)
    - least(coalesce(p_pace.credit, 0), fairq._step(64 * (select coalesce(max(e.used), 1) from unnest(p_pace.estimates) e), p_weight))
    + sign(coalesce(p_correction, 0))::bigint * ceil(least(1152921504606846976, fairq._round() * abs(coalesce(p_correction, 0)) / p_weight))::bigint);
  v_pace.unit := p_unit;
  -- Sums of fractions end near zero, not at it.
  v_pace.reserved := coalesce(p_pace.reserved, 0) - coalesce(p_charged, 0);
  v_pace.reserved := case when v_pace.reserved < 0.000001 then 0 else v_pace.reserved end;
  v_pace.last_block := coalesce(p_pace.last_block, p_finish - 1, -1);
  v_pace.estimates := fairq._learn(p_pace.estimates, p_ran);
  v_finish := greatest(v_due, v_pace.last_block + 1, p_clock);
  v_pace.credit := case
    when p_was_idle then 0
    else greatest(0, least(v_finish, coalesce(p_finish, p_clock)) - v_due)
  end;
  return query select v_finish, v_pace;
end;
$$;

-- The estimates of a lane, brought up to date: per kind the mean of the first 16 attempts, then a moving mean. One attempt counts as at most four times what
-- was expected, and at least a quarter: otherwise a hang among quick tasks would make the next ones dear. The correction charges what it really used all
-- the same. The 32 kinds seen last are kept.
create function fairq._learn(p_known fairq.estimate[], p_ran fairq.estimate[]) returns fairq.estimate[]
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_ran fairq.estimate;
  v_known fairq.estimate;
  v_expected double precision;
  v_part double precision;
  v_estimates fairq.estimate[] := coalesce(p_known, '{}');
begin
  for v_ran in
    select r.kind, sum(r.tasks)::integer, sum(r.used) / sum(r.tasks), sum(r.cost) / sum(r.tasks)
    from unnest(p_ran) r
    group by r.kind
    order by r.kind
  loop
    select e.* into v_known from unnest(v_estimates) e where e.kind = v_ran.kind;
    if found then
      v_expected := v_ran.cost * v_known.used / v_known.cost;
      v_part := least(1, v_ran.tasks::double precision / least(16, v_known.tasks + v_ran.tasks));
      v_ran.used := v_known.used + (greatest(v_expected / 4, least(v_expected * 4, v_ran.used)) - v_known.used) * v_part;
      v_ran.cost := v_known.cost + (v_ran.cost - v_known.cost) * v_part;
      v_ran.tasks := v_known.tasks + v_ran.tasks;
    end if;
    v_ran.tasks := least(16, v_ran.tasks);
    v_ran.used := greatest(0.0001, v_ran.used);
    v_estimates := (v_ran || array(
      select (e.kind, e.tasks, e.used, e.cost)::fairq.estimate
      from unnest(v_estimates) with ordinality as e(kind, tasks, used, cost, nth)
      where e.kind <> v_ran.kind
      order by e.nth
    ))[1:32];
  end loop;
  return v_estimates;
end;
$$;
