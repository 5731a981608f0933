-- The tasks among p_ids that the worker holds in the attempts named, locked: their ids and where they are. The fencing of release and start.
create function fairq._held_by(
  p_shard_no integer,
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_state text,
  out o_ids bigint[],
  out o_ctids tid[]
)
language plpgsql
volatile
set search_path = ''
as $$
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  -- Nobody holds a task that waits: no worker is not a worker.
  if p_worker_id is null then
    return;
  end if;
  -- Each is looked up by its id, in the order of the ids: two calls with the same tasks wait for each other and do not deadlock.
  select array_agg(h.id), array_agg(h.ctid)
  into o_ids, o_ctids
  from (select u.id, u.attempt from unnest(p_ids, p_attempts) as u(id, attempt) order by u.id) i
  cross join lateral (
    select t.id, t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.id = i.id
      and t.attempt = i.attempt
      and t.worker_id is not distinct from p_worker_id
      and (p_state is null or t.state is not distinct from p_state)
    for update
    offset 0
  ) h;
end;
$$;
comment on function fairq._held_by(integer, bigint, bigint[], integer[], text) is 'Locks and returns the tasks that a worker still holds.';
