-- The estimates of a lane, kept up: per kind the mean of the first 16 attempts, then a moving one. One attempt counts as four times the estimate at most, and as a quarter
-- at least: a hang among quick tasks would make the next ones dear. What it really took is charged all the same, by the correction.
-- The 32 kinds seen last are kept.
create function fairq._learn(p_known fairq.estimate[], p_ran fairq.estimate[]) returns fairq.estimate[]
language plpgsql
immutable
set search_path = ''
as $$
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
comment on function fairq._learn(fairq.estimate[], fairq.estimate[]) is 'The estimates of a lane after attempts were measured.';
