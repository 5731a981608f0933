-- Pauses a group, or, with p_user_key, one of its users: none of its tasks is promoted. Ready tasks go back in line with the next promotion, running tasks go
-- on. Costs the same however many tasks wait.
-- Raises QF001 group key, QF003 unknown queue, QF006 user key. Locks: groups, one row.
create function fairq.pause_group(p_queue text, p_group_key text, p_user_key text default null) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_shard_no integer := fairq._group_shard(p_queue, p_group_key, p_user_key);
begin
  insert into fairq.groups as g (shard_no, queue, group_key, user_key, paused_at)
  values (v_shard_no, p_queue, p_group_key, coalesce(p_user_key, ''), fairq._now())
  on conflict (shard_no, queue, group_key, user_key) do update
  set paused_at = coalesce(g.paused_at, excluded.paused_at);
  perform fairq._ring_group(v_shard_no, p_queue, p_group_key, p_user_key);
end;
$$;
comment on function fairq.pause_group is 'Stops serving a group, or one of its users, until it is resumed.';

-- Rings "look at this group", at this user of it, or at this counter (see counters.sql): its settings changed, or it is held until p_hold_until, by the task
-- p_held_by or an operator. Wakes sleeping workers, unless it begins a hold: of a concurrency key those of the queues where a task waits for it, of the cluster
-- all.
create function fairq._ring_group(
  p_shard_no integer, p_queue text, p_group_key text, p_user_key text default null, p_hold_until timestamptz default null, p_held_by bigint default null
) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, user_key, configured, hold_until, held_by)
  values (p_shard_no, p_queue, p_group_key, p_user_key, true, p_hold_until, p_held_by);
  insert into fairq.limit_changes (shard_no, queue, group_key, until)
  values (p_shard_no, p_queue, p_group_key, coalesce(p_hold_until, fairq._now()));
  perform pg_notify('fairq', q.queue)
  from fairq.queues q
  where q.notify and not q.internal and p_hold_until is null
    and (q.queue = p_queue
      or p_queue = '#cluster'
      or p_queue = '#keys'
        and exists (
          select from fairq.parked k where k.shard_no = p_shard_no and k.concurrency_key = p_group_key and k.queue = q.queue and not k.granted offset 0
        ));
end;
$$;
