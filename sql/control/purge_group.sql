-- Cancels all waiting tasks of a group, or, with p_user_key, of one of its users: in line, ready, scheduled and parked. With p_until only those created by
-- then, so that no task goes that the operator has not seen. Claimed and running tasks stay; cancel_task is for those. Promotion cancels the ready ones, and
-- gives the group its addresses back: it owes nothing for tasks that did not run.
-- Returns how many tasks it ended. Raises QF001 group key, QF003 unknown queue, QF006 user key, QF005 not READ COMMITTED.
-- Locks: the domain and #keys, and waits for them; the tasks, but for those being popped. Cost: what the group has waiting, and the queue's scheduled tasks.
create function fairq.purge_group(p_queue text, p_group_key text, p_user_key text default null, p_until timestamptz default null) returns integer
language plpgsql security definer set search_path = pg_catalog, pg_temp set plan_cache_mode = 'force_generic_plan' set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer := fairq._group_shard(p_queue, p_group_key, p_user_key);
  v_until timestamptz := coalesce(p_until, 'infinity');
  v_other integer;
  v_ready bigint[];
  v_ended integer;
begin
  v_shard_no := fairq._lock_group(p_queue, p_group_key);
  -- Whoever ends tasks that wait for a key holds #keys.
  perform fairq._lock_counters(v_shard_no, '#keys', true);
  v_ready := array(
    select r.id from fairq.ready r
    where r.shard_no = v_shard_no and r.queue = p_queue and r.position >= 0 and r.group_key = p_group_key
      and r.user_key = coalesce(p_user_key, r.user_key)
      and (p_until is null or (select t.created_at from fairq.tasks t where t.shard_no = v_shard_no and t.id = r.id) <= v_until)
    for update skip locked
  );
  v_ended := cardinality(v_ready);
  -- While groups move, scheduled tasks may still be in the shard where the group was.
  for v_other in
    select s.shard_no from fairq.settings f cross join fairq._shards(null) s(shard_no) where s.shard_no = v_shard_no or f.moving_from is not null
  loop
    v_ended := v_ended + cardinality(fairq._end_waiting(v_other, array(
      select t.id
      from (
        -- Apart: each of the two has an index.
        select k.* from fairq.tasks k where k.shard_no = v_other and not k.scheduled and v_other = v_shard_no
        union all
        select k.* from fairq.tasks k where k.shard_no = v_other and k.scheduled
      ) t
      where t.queue = p_queue and t.group_key = p_group_key and t.user_key = coalesce(p_user_key, t.user_key) and t.created_at <= v_until and t.id <> all(v_ready)
    ), 'cancelled', v_now));
  end loop;
  insert into fairq.cancellations (shard_no, task_id, requested_at)
  select v_shard_no, r.id, v_now from unnest(v_ready) r(id);
  perform fairq._ring_wishes(v_shard_no, v_ready);
  -- A pass hears some thousand rings, and others may come before these. A later pass ends what is still ready after ten.
  for v_round in 1 .. 10 loop
    perform fairq._promote(v_shard_no, p_queue, 1, true);
    exit when not exists (
      select from unnest(v_ready) i(id) cross join lateral (select r.id from fairq.ready r where r.shard_no = v_shard_no and r.id = i.id offset 0) r
    );
  end loop;
  return v_ended;
end;
$$;
comment on function fairq.purge_group is 'Cancels everything a group, or one of its users, has waiting. Returns the number of tasks.';
