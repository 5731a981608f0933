create function fairq._shards(p_shard_no integer) returns setof integer
language sql
stable
rows 1
as $$
  select generate_series(coalesce(p_shard_no, 0), coalesce(p_shard_no, s.shard_count - 1))
  from fairq.settings s
$$;
comment on function fairq._shards(integer) is 'The shard named, or all of them.';
