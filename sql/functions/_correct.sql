-- Where a lane of a queue that shares time goes on after its attempts took p_correction seconds more than was charged for them, or less.
-- What was charged too much is given back as far as p_clock and the last address given out: tasks of a group keep their order. The rest is credit, for the
-- next correction; without it a group whose tasks differ in length would lose a little each time. Credit is worth sixteen tasks at most, and is lost when the group
-- has nothing waiting, or a group whose estimate was far too high would come with a flood.
create function fairq._correct(
  p_finish bigint,
  p_pace fairq.pace,
  p_correction double precision,
  p_ran fairq.estimate[],
  p_weight double precision,
  p_clock bigint,
  p_was_idle boolean
) returns table (finish bigint, pace fairq.pace)
language plpgsql
immutable
rows 1
set search_path = ''
as $$
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
comment on function fairq._correct(bigint, fairq.pace, double precision, fairq.estimate[], double precision, bigint, boolean) is
  'Finish tag and pace of a lane after its attempts took more or less than was charged.';
