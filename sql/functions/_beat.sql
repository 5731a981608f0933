-- Writes a sign of life: insert the new one, delete the ones before it.
create function fairq._beat(p_shard_no integer, p_worker_id bigint, p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_previous timestamptz;
begin
  select h.beat_at into v_previous
  from fairq.heartbeats h
  where h.shard_no = p_shard_no
    and h.worker_id = p_worker_id
  order by h.beat_at desc
  limit 1;
  if v_previous >= p_now then
    return;
  end if;
  insert into fairq.heartbeats (shard_no, worker_id, beat_at)
  values (p_shard_no, p_worker_id, p_now)
  on conflict do nothing;
  -- Only the row just read: an older one is already gone, and dead rows are not walked again.
  delete from fairq.heartbeats h
  where h.shard_no = p_shard_no
    and h.worker_id = p_worker_id
    and h.beat_at = v_previous;
end;
$$;
comment on function fairq._beat(integer, bigint, timestamptz) is 'Writes a sign of life of a worker.';
