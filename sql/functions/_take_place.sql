-- Takes one place of a concurrency key, or of a meter, if there is one. A key nobody used yet has no lane: its policy is looked up then.
-- Returns false when there is none.
-- Locks: lanes, one row replaced; the caller holds the domain of p_queue.
create function fairq._take_place(p_shard_no integer, p_queue text, p_group_key text, p_now timestamptz, p_places integer default 1)
returns boolean
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lane fairq.lanes := fairq._lane(p_shard_no, p_queue, p_group_key);
begin
  if v_lane.policy is null then
    select fairq._policy(q, g) into v_lane.policy
    from fairq.queues q
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = q.queue and g.group_key = p_group_key
    where q.queue = p_queue;
  end if;
  if v_lane.policy is null then
    return true;
  end if;
  if (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks < p_places then
    return false;
  end if;

  insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, policy, gate, cursors, admissible)
  values (p_shard_no, p_queue, p_group_key, coalesce(v_lane.version, 0) + 1, coalesce(v_lane.lane_no, 0), 0, 0, 1, v_lane.policy,
    fairq._charge(v_lane.policy, v_lane.gate, p_places, p_now), '{}', false);
  delete from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue
    and l.group_key = p_group_key
    and l.version = v_lane.version;
  return true;
end;
$$;
comment on function fairq._take_place(integer, text, text, timestamptz, integer) is 'Takes places of a key or meter; false: there is none.';
