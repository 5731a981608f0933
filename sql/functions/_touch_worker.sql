-- Checks that a worker is known, and renews its heartbeat when a third of its lease is gone: working is a sign of life.
-- Raises QF004.
-- With p_hold the worker's row is locked until the transaction ends: it is not struck off between a pop and its commit, which would leave the
-- tasks with nobody.
-- Locks: workers, one row, shared; heartbeats, the worker's own rows.
-- Cost: one entry of heartbeats_pkey, read backwards.
create function fairq._touch_worker(p_shard_no integer, p_worker_id bigint, p_now timestamptz, p_hold boolean default false)
returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lease interval;
  v_beat_at timestamptz;
begin
  select w.lease, (
      select h.beat_at
      from fairq.heartbeats h
      where h.shard_no = p_shard_no
        and h.worker_id = p_worker_id
      order by h.beat_at desc
      limit 1
    )
  into v_lease, v_beat_at
  from fairq.workers w
  where w.shard_no = p_shard_no
    and w.worker_id = p_worker_id;
  if found and p_hold then
    perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id for key share;
  end if;
  if not found then
    raise exception 'there is no worker %', coalesce(p_worker_id::text, 'null')
      using errcode = 'QF004',
        hint = 'It was retired, or counted as lost because it gave no sign of life for its lease. Register again: select fairq.register_worker(...);';
  end if;

  if v_beat_at is null or v_beat_at < p_now - v_lease / 3 then
    perform fairq._beat(p_shard_no, p_worker_id, p_now);
  end if;
end;
$$;
comment on function fairq._touch_worker(integer, bigint, timestamptz, boolean) is 'Checks that a worker is known; working counts as a sign of life.';
