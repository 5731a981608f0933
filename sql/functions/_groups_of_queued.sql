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
      select k.group_key
      from fairq.tasks k
      where k.shard_no = p_shard_no
        and k.id = i.id
        and k.state = 'queued'
      offset 0
    ) t
  );
end;
$$;
comment on function fairq._groups_of_queued(integer, bigint[]) is 'The groups of those tasks that are queued.';
