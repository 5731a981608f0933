-- When a sleeping worker has to look at a queue again although nothing rings: a scheduled task becomes due, a rate or a breaker lets the next task pass, or a
-- hold ends.
-- Returns null when there is no such time.
create function fairq.next_due_at(p_queue text) returns timestamptz
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_next timestamptz;
  v_metered timestamptz;
begin
  select min(least(k.next_due_at, case when k.keyed then (select y.next_due_at from fairq._tick(s.shard_no, '#keys') y) end)) into v_next
  from fairq._shards(null) s(shard_no)
  cross join lateral fairq._tick(s.shard_no, p_queue) k;
  if (select q.metered from fairq.queues q where q.queue = p_queue) then
    select max((fairq._allowance(l.policy, l.gate, v_now)).look_at) into v_metered
    from fairq._meters(p_queue) m
    cross join lateral fairq._lane(0, '#' || m.scope, m.scope) l
    where l.policy is distinct from null;
  end if;
  return least(v_next, v_metered);
end;
$$;
comment on function fairq.next_due_at is 'The latest time at which a sleeping worker should look at a queue again.';
