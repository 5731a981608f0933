-- Seconds that a task is expected to take: the estimate of its group and kind; the cost it was created with while there is none.
create function fairq._expected(p_pace fairq.pace, p_kind text, p_cost double precision) returns double precision
language sql immutable parallel safe
as $$ select coalesce((select e.seconds from unnest(p_pace.estimates) e where e.kind = p_kind), p_cost) $$;

-- Where a lane of a queue that shares time goes on after its attempts took p_correction seconds more than was charged for them, or less.
-- What was charged too much is given back as far as p_clock and the last address given out: tasks of a group keep their order. The rest is credit, for the
-- next correction; without it a group whose tasks differ in length would lose a little each time. Credit is worth sixteen tasks at most, and is lost when the group
-- has nothing waiting, or a group whose estimate was far too high would come with a flood.
create function fairq._correct(
  p_finish bigint, p_pace fairq.pace, p_correction double precision, p_ran fairq.estimate[], p_weight double precision, p_clock bigint,
  p_was_idle boolean
) returns table (finish bigint, pace fairq.pace)
language plpgsql immutable rows 1 set search_path = pg_catalog, pg_temp as $$
declare
  v_due bigint := coalesce(p_finish, p_clock) - coalesce(p_pace.credit, 0)
    + sign(coalesce(p_correction, 0))::bigint * fairq._step(abs(coalesce(p_correction, 0)), p_weight);
  v_finish bigint;
  v_pace fairq.pace;
begin
  v_pace.last_block := coalesce(p_pace.last_block, p_finish - 1, -1);
  v_pace.estimates := fairq._learn(p_pace.estimates, p_ran);
  v_finish := greatest(v_due, v_pace.last_block + 1, p_clock);
  v_pace.credit := case
    when p_was_idle then 0
    else least(v_finish - v_due, fairq._step(16 * (select coalesce(max(e.seconds), 1) from unnest(v_pace.estimates) e), p_weight))
  end;
  return query select v_finish, v_pace;
end;
$$;

-- The estimates of a lane, kept up: per kind the mean of the first 16 attempts, then a moving one. One attempt counts as four times the estimate at most, and as a quarter
-- at least: a hang among quick tasks would make the next ones dear. What it really took is charged all the same, by the correction.
-- The 32 kinds seen last are kept.
create function fairq._learn(p_known fairq.estimate[], p_ran fairq.estimate[]) returns fairq.estimate[]
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_ran fairq.estimate;
  v_known fairq.estimate;
  v_estimates fairq.estimate[] := coalesce(p_known, '{}');
begin
  for v_ran in
    select r.kind, sum(r.tasks)::integer, sum(r.seconds) / sum(r.tasks)
    from unnest(p_ran) r
    group by r.kind
    order by r.kind
  loop
    select e.* into v_known from unnest(v_estimates) e where e.kind = v_ran.kind;
    if found then
      v_ran.seconds := greatest(v_known.seconds / 4, least(v_known.seconds * 4, v_ran.seconds));
      v_ran.seconds := v_known.seconds + (v_ran.seconds - v_known.seconds) * least(1, v_ran.tasks::double precision / least(16, v_known.tasks + v_ran.tasks));
      v_ran.tasks := v_known.tasks + v_ran.tasks;
    end if;
    v_ran.tasks := least(16, v_ran.tasks);
    v_ran.seconds := greatest(0.0001, v_ran.seconds);
    v_estimates := (v_ran || array(
      select (e.kind, e.tasks, e.seconds)::fairq.estimate
      from unnest(v_estimates) with ordinality as e(kind, tasks, seconds, nth)
      where e.kind <> v_ran.kind
      order by e.nth
    ))[1:32];
  end loop;
  return v_estimates;
end;
$$;
