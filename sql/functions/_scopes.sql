-- Where a task in flight holds places: with its group, its concurrency key, its queue, the cluster. Each is a lane, and a task that leaves rings
-- each of them. The one list: whoever takes a task out of flight reads it here.
create function fairq._scopes(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_counted boolean,
  p_meters integer,
  p_concurrency_key text
) returns table (shard_no integer, queue text, group_key text)
language sql
immutable
rows 1
as $$
  select p_shard_no, p_queue, p_group_key where p_counted
  union all
  select p_shard_no, '#keys', p_concurrency_key where p_concurrency_key is not null
  union all
  select 0, '#meters', 'queue ' || p_queue where p_meters & 1 <> 0
  union all
  select 0, '#meters', 'cluster' where p_meters & 2 <> 0
$$;
comment on function fairq._scopes(integer, text, text, boolean, integer, text) is 'The lanes in which a task in flight holds a place.';
