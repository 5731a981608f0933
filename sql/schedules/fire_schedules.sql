-- Creates the tasks of schedules that are due, at most p_limit, an equal part of each shard (at least one), one tick of each schedule. Any number of callers
-- may do so, as often as they like. They should create a few at a time: the task of a group that had none comes before what its neighbours enqueue next, but a
-- tick that is not fired yet comes before nobody. So a caller may name the last task of its previous call (p_after): none is created before that one has begun.
-- Returns {"fired": how many tasks, "last": the id of the last one, "due_in": seconds until a schedule is due (0 or less: more are due now, null: none will
-- be), "unplanned": whether the caller may renew a plan}. Raises QF007 bad limit. Locks: schedules, "skip locked".
-- Cost: when nothing is due, one step in schedules_fire_at_idx and one in schedules_plan_at_idx; with p_after two look-ups of its id.
create function fairq.fire_schedules(p_limit integer default 100, p_after bigint default null) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off set enable_sort = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_most integer;
  v_fired bigint[] := array[]::bigint[];
  v_fire_at timestamptz;
  v_plan_at timestamptz;
  v_waits boolean;
begin
  perform fairq._check_limit(p_limit);
  v_waits := exists (
    select from fairq._shards(null) s(shard_no)
    cross join lateral fairq._body(s.shard_no, p_after) t
    where t.attempt = 0
      and not exists (select from fairq.held h where h.shard_no = s.shard_no and h.id = p_after and h.started_at is not null offset 0)
  );
  for v_shard_no, v_most in select s.shard_no, greatest(1, p_limit / count(*) over ())::integer from fairq._shards(null) s(shard_no) loop
    if not v_waits then v_fired := v_fired || fairq._fire_due(v_shard_no, v_most, v_now); end if;
    -- Not min(): if the plan was made while the table was empty, it might use any other index.
    v_fire_at := least(v_fire_at, (select s.fire_at from fairq.schedules s where s.shard_no = v_shard_no and s.fire_at is not null order by s.fire_at limit 1));
    v_plan_at := least(v_plan_at, (
      select s.plan_at from fairq.schedules s
      where s.shard_no = v_shard_no and s.plan_at is not null and fairq._may_plan(s.queue)
      order by s.plan_at limit 1
    ));
  end loop;
  return jsonb_build_object('fired', cardinality(v_fired), 'last', v_fired[cardinality(v_fired)],
    'due_in', extract(epoch from v_fire_at - fairq._now()), 'unplanned', coalesce(v_plan_at <= v_now, false));
end;
$$;
comment on function fairq.fire_schedules is 'Creates the tasks of schedules that are due, and says when to look again.';
