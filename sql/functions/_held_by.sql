-- The ids among p_ids that the worker holds in the attempts named, locked. The fencing of release and start.
create function fairq._held_by(p_shard_no integer, p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_state text)
returns bigint[]
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ids bigint[];
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  select array_agg(h.id) into v_ids
  from (
    select t.id
    from unnest(p_ids, p_attempts) as i(id, attempt)
    join fairq.tasks t on t.shard_no = p_shard_no and t.id = i.id
    where t.attempt = i.attempt
      and t.worker_id is not distinct from p_worker_id
      and (p_state is null or t.state is not distinct from p_state)
    order by t.id
    for update of t
  ) h;
  return coalesce(v_ids, '{}');
end;
$$;
comment on function fairq._held_by(integer, bigint, bigint[], integer[], text) is 'Locks and returns the tasks that a worker still holds.';
