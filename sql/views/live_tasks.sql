-- What a live task is doing, put together from body, ready, held and parked. For people and dashboards, not for a tight loop.
create view fairq.live_tasks as
select t.shard_no, t.id, t.queue, t.group_key, t.kind, t.priority, t.sequence, t.cost, t.created_at,
  coalesce(t.run_at, t.created_at) as run_at, t.expires_at, t.timeout, t.max_attempts, t.idempotency_key, t.concurrency_key,
  nullif(t.user_key, '')::text as user_key,
  case
    when h.id is not null then case when h.started_at is null then 'claimed' else 'running' end
    when r.id is not null then 'queued'
    when t.scheduled then 'scheduled'
    when k.id is not null then 'blocked'
    else 'overflow'
  end as state,
  coalesce(h.attempt, t.attempt) as attempt, coalesce(t.losses, 0) as losses,
  h.worker_id, h.started_at, h.lease_expires_at, r.block, r.position,
  coalesce(h.counted, r.counted, false) as counted,
  coalesce(h.user_counted, r.user_counted, false) as user_counted,
  coalesce(h.keyed, k.granted or k.concurrency_key = '', r.keyed_at is not null) as keyed,
  coalesce(h.meters, 0) as meters,
  coalesce(h.charge, r.charge) as charge
from fairq.tasks t
left join fairq.held h on h.shard_no = t.shard_no and h.id = t.id
left join fairq.ready r on r.shard_no = t.shard_no and r.id = t.id
left join fairq.parked k on k.shard_no = t.shard_no and k.id = t.id;
comment on view fairq.live_tasks is
  'Live tasks and what they are doing: scheduled, overflow (waiting, not yet in the order), blocked (its concurrency key has no place, or it is long and '
  'no slot for long tasks is free), queued (has an address), claimed, running.';
