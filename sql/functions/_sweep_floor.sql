create function fairq._sweep_floor(p_shard_no integer, p_what text) returns bigint
language sql
stable
as $$
  select max(w.floor) from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what
$$;
comment on function fairq._sweep_floor(integer, text) is 'Where the next sweep of a kind starts; null: at the beginning.';
