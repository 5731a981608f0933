-- The groups of those tasks that are queued. The state is looked at after the task was found by its id: within the look-up the planner takes the ready
-- index for the shorter way, and reads all of it, dead entries included, for every id.
create function fairq._groups_of_queued(p_shard_no integer, p_ids bigint[]) returns text[]
language plpgsql
stable
set search_path = ''
as $$
begin
  return array(
    select distinct t.group_key
    from unnest(p_ids) i(id)
    cross join lateral (
      select k.group_key, k.state
      from fairq.tasks k
      where k.shard_no = p_shard_no
        and k.id = i.id
      offset 0
    ) t
    where t.state = 'queued'
  );
end;
$$;
comment on function fairq._groups_of_queued(integer, bigint[]) is 'The groups of those tasks that are queued.';
