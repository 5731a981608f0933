-- Every index of fairq.tasks is partial on its state, so a task stands in at most two of them at a time (the primary key and one more).

-- pop_tasks, the clock: tasks in served order, from the clock on.
create index tasks_ready_idx on fairq.tasks (shard_no, queue, block, position) where state = 'queued';

-- promotion: a group's waiting tasks, from the lane's cursor on.
create index tasks_overflow_idx on fairq.tasks (shard_no, queue, group_key, priority desc, sequence) where state = 'overflow';

-- promotion: scheduled tasks that are due.
create index tasks_due_idx on fairq.tasks (shard_no, queue, run_at) where state = 'scheduled';

-- heartbeat, recovery: what a worker holds.
create index tasks_held_idx on fairq.tasks (shard_no, worker_id) where worker_id is not null;

-- maintain: deadlines passed while waiting.
create index tasks_expiry_idx on fairq.tasks (shard_no, expires_at)
  where expires_at is not null and state in ('scheduled', 'overflow', 'blocked', 'queued');

-- maintain: claims whose lease ran out (prefetch only).
create index tasks_claim_lease_idx on fairq.tasks (shard_no, lease_expires_at) where state = 'claimed';

-- promotion: new rings, by transaction; within the transaction that promoted last, those it rang since.
create index rings_xid_idx on fairq.rings (shard_no, queue, xid, ring_id);

-- create_task: whether a NOTIFY is on its way, or not yet heeded.
create index rings_announced_idx on fairq.rings (shard_no, queue, xid) where announced;

-- promotion: lanes with admissible overflow in order of their next task; maintain: idle lanes behind the clock.
create index lanes_order_idx on fairq.lanes (shard_no, queue, admissible, finish, position);

-- promotion: tasks that wait for a concurrency key, per group.
create index tasks_blocked_idx on fairq.tasks (shard_no, concurrency_key, queue, group_key, priority desc, sequence) where state = 'blocked';

-- promotion: lanes that a rate or a breaker holds back until a time.
create index lanes_look_at_idx on fairq.lanes (shard_no, queue, look_at) where look_at is not null;

-- result, explain_task, retry_task: an ended task by id.
create index finished_tasks_id_idx on fairq.finished_tasks (shard_no, id);

-- explain_task: the attempts of a task.
create index attempts_task_idx on fairq.attempts (shard_no, task_id);

-- heartbeat: is this task to be cancelled?
create index cancellations_task_idx on fairq.cancellations (shard_no, task_id);

-- finish, cancel, expire, recover: does anybody wait for the end of a task? Read from now on, so what was swept behind costs nothing.
create index watches_until_idx on fairq.watches (shard_no, until, task_id);

-- maintain: idempotency keys past their retention.
create index idempotency_keys_age_idx on fairq.idempotency_keys (shard_no, created_at);

-- maintain: what the default partitions hold past its retention. The other days are dropped whole. A new installation runs its first tasks into
-- these partitions, and without an index every maintain() would read them all.
create index finished_tasks_default_age_idx on fairq.finished_tasks_default (shard_no, finished_at);
create index attempts_default_age_idx on fairq.attempts_default (shard_no, ended_at);
