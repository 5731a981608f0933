-- Keys and meters have no tasks of their own: their places are those of the tasks in flight, which ring here. Those with settings have a lane in any case.
-- A key that tasks wait for rings, too: it may have come free, and the ring that told of it is among those forgotten.
-- One statement, as in _rebuild_lanes.
-- Returns the snapshot.
-- Locks: rings of the domain; the caller holds the domain.
-- Cost: all tasks in flight, of all shards for the meters; for the keys all blocked tasks.
create function fairq._rebuild_places(p_shard_no integer, p_queue text) returns pg_snapshot
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_snapshot pg_snapshot;
begin
  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue
  ),
  configured as (
    insert into fairq.rings (shard_no, queue, group_key)
    select g.shard_no, g.queue, g.group_key
    from fairq.groups g
    where g.shard_no = p_shard_no
      and g.queue = p_queue
  ),
  waited_for as (
    insert into fairq.rings (shard_no, queue, group_key)
    select distinct t.shard_no, '#keys', t.concurrency_key
    from fairq.tasks t
    where p_queue = '#keys'
      and t.shard_no = p_shard_no
      and t.state = 'blocked'
  ),
  taken as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, -count(*)
    from fairq._shards(case when p_queue = '#keys' then p_shard_no end) x(shard_no)
    cross join lateral (
      select t.shard_no, t.queue, t.group_key, t.counted, t.meters, t.concurrency_key
      from fairq.tasks t
      where t.shard_no = x.shard_no
        and t.block is not null
        and (t.meters <> 0 or t.concurrency_key is not null)
      offset 0
    ) t
    cross join lateral fairq._scopes(t.shard_no, t.queue, t.group_key, t.counted, t.meters, t.concurrency_key) s
    where s.shard_no = p_shard_no
      and s.queue = p_queue
    group by s.shard_no, s.queue, s.group_key
  )
  select pg_current_snapshot() into v_snapshot;
  return v_snapshot;
end;
$$;
comment on function fairq._rebuild_places(integer, text) is 'Makes the places of keys or meters anew from the tasks in flight.';
