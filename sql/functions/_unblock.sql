-- Keys that have places again: per key and group, as many blocked tasks as there are places go back to overflow and ring. They take their key when their
-- turn comes; whoever comes first gets it, the others become blocked again. Per group, because the first of one group may have to wait for
-- reasons of its own while the key is free for others.
-- Locks: tasks, blocked rows, which change only under the lock of #keys, which the caller holds.
-- Cost: tasks_blocked_idx, one step per group that waits for the key.
create function fairq._unblock(p_shard_no integer, p_lanes fairq.lanes[], p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
begin
  with recursive key as (
    select l.group_key as concurrency_key, (fairq._allowance(l.policy, l.gate, p_now)).tasks as places
    from unnest(p_lanes) l
  ),
  -- A loose walk: the next group that waits for the key after the one before.
  waiting as (
    select k.concurrency_key, k.places, f.queue, f.group_key
    from key k
    cross join lateral (
      select t.queue, t.group_key
      from fairq.tasks t
      where t.shard_no = p_shard_no
        and t.state = 'blocked'
        and t.concurrency_key = k.concurrency_key
      order by t.queue, t.group_key
      limit 1
    ) f
    where k.places > 0
    union all
    select w.concurrency_key, w.places, f.queue, f.group_key
    from waiting w
    cross join lateral (
      select t.queue, t.group_key
      from fairq.tasks t
      where t.shard_no = p_shard_no
        and t.state = 'blocked'
        and t.concurrency_key = w.concurrency_key
        and (t.queue, t.group_key) > (w.queue, w.group_key)
      order by t.queue, t.group_key
      limit 1
    ) f
  )
  select array_agg(n.ctid) into v_ctids
  from waiting w
  cross join lateral (
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state = 'blocked'
      and t.concurrency_key = w.concurrency_key
      and t.queue = w.queue
      and t.group_key = w.group_key
    order by t.priority desc, t.sequence
    limit w.places
  ) n;
  if v_ctids is not null then
    perform fairq._line_up(p_shard_no, v_ctids);
  end if;
end;
$$;
comment on function fairq._unblock(integer, fairq.lanes[], timestamptz) is 'Puts tasks whose concurrency key has a place again back in line.';
