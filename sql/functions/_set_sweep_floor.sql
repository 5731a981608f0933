create function fairq._set_sweep_floor(p_shard_no integer, p_what text, p_floor bigint) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_previous bigint := fairq._sweep_floor(p_shard_no, p_what);
begin
  if p_floor is null or p_floor <= v_previous then
    return;
  end if;
  insert into fairq.sweeps (shard_no, what, floor) values (p_shard_no, p_what, p_floor);
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what and w.floor = v_previous;
end;
$$;
comment on function fairq._set_sweep_floor(integer, text, bigint) is 'Remembers how far a sweep has come.';
