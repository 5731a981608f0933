-- Functions say which ways the planner may take ("set enable_..."), because a session keeps a plan that was made with statistics that were missing or old.
-- enable_sort is off where an index gives rows in order: for a table that was analysed while it was empty, another index and a sort look cheaper, and read all
-- of it.

-- promotion: a line, of a group or of one of its users, from the lane's cursor on. Held and ready tasks are in it, too. The highest priority comes first, in a
-- form in which a place in line is one comparison of rows.
create index tasks_line_idx on fairq.tasks (shard_no, queue, group_key, user_key, (-priority), sequence) where not scheduled;

-- promotion: scheduled tasks that are due.
create index tasks_due_idx on fairq.tasks (shard_no, queue, run_at) where scheduled;

-- maintain: waiting tasks past their deadline.
create index tasks_expiry_idx on fairq.tasks (shard_no, expires_at) where expires_at is not null;

-- pop_tasks, the clock: tasks in served order, from the clock on. Partial, though its condition is true of every row: so the statistics of an empty table
-- cannot lead the look-up of an id here.
create index ready_order_idx on fairq.ready (shard_no, queue, block, position) where position >= 0;

-- maintain: claims whose lease ran out (prefetch only).
create index held_claim_lease_idx on fairq.held (shard_no, lease_expires_at) where lease_expires_at is not null;

-- promotion: the group whose turn it is at a concurrency key, from the key's own clock on.
create index parked_turn_idx on fairq.parked (shard_no, concurrency_key, turn, id) where turn is not null;

-- promotion: the tasks of a group that wait for a key.
create index parked_line_idx on fairq.parked (shard_no, concurrency_key, queue, group_key, (-priority), sequence) where not granted;

-- promotion: the group whose long task is next.
create index parked_long_idx on fairq.parked (shard_no, queue, turn, id) where concurrency_key = '' and turn is not null;

-- promotion: long tasks in flight.
create index held_long_idx on fairq.held (shard_no) where meters >= 4;

-- promotion: tasks that were granted a place of a key, or a slot, and are not placed yet.
create index parked_granted_idx on fairq.parked (shard_no, queue, group_key, user_key) where granted;

-- promotion: new rings, by transaction; of the transaction that promoted last, those since then.
create index rings_xid_idx on fairq.rings (shard_no, queue, xid, ring_id);

-- create_task: whether a NOTIFY is on its way, or its ring is not yet heard; promotion: whether there are changed settings that it has not heard of.
create index rings_notable_idx on fairq.rings (shard_no, queue, xid) where announced or configured;

-- promotion: lanes of groups with tasks to promote, in the order of their next task; maintain: idle lanes behind the clock.
create index lanes_order_idx on fairq.lanes (shard_no, queue, admissible, finish, position) where user_key = '';

-- promotion: the same for the users of a group, in their own virtual time.
create index lanes_users_idx on fairq.lanes (shard_no, queue, group_key, admissible, finish, position)
where queue like '#users %';

-- maintain: whether any group of a queue has waiting tasks with keys.
create index lanes_keyed_idx on fairq.lanes (shard_no, queue) where keyed;

-- promotion: lanes that must wait until a time, by a rate, a breaker, a budget or a hold; maintain: keys without a taken place.
create index lanes_look_at_idx on fairq.lanes (shard_no, queue, look_at) where look_at is not null;

-- task_result, explain_task, retry_task: an ended task by id.
create index finished_tasks_id_idx on fairq.finished_tasks (shard_no, id);

-- explain_task: the attempts of a task.
create index attempts_task_idx on fairq.attempts (shard_no, task_id);

-- heartbeat: is this task to be cancelled?
create index cancellations_task_idx on fairq.cancellations (shard_no, task_id);

-- finish, cancel, expire, recover: whether anybody waits for the end of a task. The scan begins at now, so dead entries of old watches cost nothing.
create index watches_until_idx on fairq.watches (shard_no, until);
-- The same for one task, however many others are watched.
create index watches_task_idx on fairq.watches (shard_no, task_id, until);

-- maintain: idempotency keys past their retention.
create index idempotency_keys_age_idx on fairq.idempotency_keys (shard_no, created_at);

-- maintain: rows of the default partitions past their retention; the other days are dropped whole. A new installation's first tasks go to these partitions,
-- and without an index every maintain() would read all of them.
create index finished_tasks_default_age_idx on fairq.finished_tasks_default (shard_no, finished_at);
create index attempts_default_age_idx on fairq.attempts_default (shard_no, ended_at);

-- maintain: attempts that ended in the last half minute. Block ranges, one entry per 128 kB: so ending a task costs nothing here.
create index finished_tasks_age_idx on fairq.finished_tasks using brin (shard_no, finished_at) with (pages_per_range = 16);
create index attempts_age_idx on fairq.attempts using brin (shard_no, ended_at) with (pages_per_range = 16);

-- fire_schedules: schedules that are due, and when the next one will be.
create index schedules_fire_at_idx on fairq.schedules (shard_no, fire_at) where fire_at is not null;

-- fire_schedules, unplanned_schedules: schedules whose plan is to be renewed.
create index schedules_plan_at_idx on fairq.schedules (shard_no, plan_at) where plan_at is not null;

-- maintain: whether the limits of a group have changed, or it was held.
create index limit_changes_group_idx on fairq.limit_changes (shard_no, queue, group_key);
