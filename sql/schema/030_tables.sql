-- Four tables hold a task. Each of their rows is written as seldom as possible:
--   tasks    the body: what the application asked for. Written once by the application, removed once when the task ends.
--   ready    the small ordered set that pops read. Derived.
--   held     who has the task, and which places it takes. The truth about holders.
--   parked   tasks that promotion met and whose concurrency key had no place, or that wait for a slot for long tasks. Derived.
-- A task waits when its body is in line (not scheduled) and it is in none of the other three: no row says so.
--
-- Lock order of the engine. A transaction that needs several of these takes them from top to bottom:
--   1. settings             each configure_* function but configure_schedule takes it first, so that two of them never wait for each other in a circle; so
--                           does move_groups, which then takes the group's settings and schedules
--   2. idempotency_keys     create_task: equal keys wait for each other; nothing else waits here
--   3. domains              promotion, one at a time per (shard, queue). A pop that asks the meters locks them before the queue, the cluster's first; a
--                           promotion that meets concurrency keys locks the queue before #keys. Domains of several shards are taken shard by shard, in
--                           each the queues by name, then #keys
--   4. held                 by the holder in the order of the ctids, by others with "skip locked"
--   5. ready, parked        pop and promotion remove rows, both with "skip locked"
--   6. tasks                bodies of waiting tasks change only under the domain's lock, those of held tasks only by their holder
--   7. lanes, ticks         written only under the domain's lock
-- An application's transaction only inserts rows (tasks, rings, cancellations). So does firing schedules, whose rows come before all others and are taken with
-- "skip locked".
--
-- Tables without a primary key have "replica identity full": otherwise no row could be deleted when somebody publishes all tables of the database. Unlike a
-- key it costs nothing, unless wal_level is logical: then a deleted row is logged in full.
--
-- A payload of up to some 4 KB stays in its row (toast_tuple_target), in tasks and in the history. By default it would go to the TOAST table from 2 KB on:
-- compressed, or written twice with an index of its own, and all of that again when the task ends. That is half the time of a task of 2 KB.
--
-- shard_no is the first column of every key and every index, and every hot statement names it: no such statement touches two shards.
-- settings, queues, kinds and moving belong to all shards.

create sequence fairq.task_ids;
comment on sequence fairq.task_ids is 'Ids of tasks, and the order in which tasks of a group became runnable.';

create sequence fairq.worker_ids;
comment on sequence fairq.worker_ids is 'Ids of workers. Never reused, so a late message of a lost worker names nobody else.';

create sequence fairq.ring_ids;
comment on sequence fairq.ring_ids is 'Order of the rings of one transaction; compared within a transaction only.';

-- Settings are columns of fairq.settings, fairq.queues, fairq.groups and fairq.kinds. fairq._check_settings has their ranges, and checks whatever is written.
create table fairq.settings (
  singleton boolean primary key default true,
  shard_count integer not null default 1, payload_limit integer not null default 1048576,
  max_running integer,
  test_clock boolean not null default false,
  moving_from integer, moving_groups integer, moving_after text[],
  constraint settings_has_one_row check (singleton)
);
comment on table fairq.settings is 'Settings of the whole installation, one row. Change them with fairq.configure_cluster().';
comment on column fairq.settings.shard_count is 'Number of shards.';
comment on column fairq.settings.moving_from is
  'The number of shards before, while groups move: those in fairq.moving are still where it put them. Null: no groups are moving.';
comment on column fairq.settings.moving_groups is 'How many groups this move has to move.';
comment on column fairq.settings.moving_after is
  'Transactions that may know groups by their old places: the move ends after they have. Null: there are groups to move first.';
comment on column fairq.settings.payload_limit is 'The largest payload, and the largest headers, that create_task accepts, in bytes of text.';
comment on column fairq.settings.test_clock is 'Tests only: the engine''s clock obeys the session setting fairq.now.';
comment on column fairq.settings.max_running is 'The most tasks in flight at once over all queues and workers; null: no cap.';

create table fairq.queues (
  queue text collate "C" primary key,
  ready_target integer, max_attempts integer not null default 5,
  retry_base interval not null default '1 second', retry_cap interval not null default '10 minutes',
  retention interval not null default '7 days', notify boolean not null default true,
  weight double precision not null default 1, fairness text collate "C" not null default 'count',
  group_max_running integer,
  group_rate_limit integer, group_rate_period interval, group_rate_burst integer,
  group_breaker_threshold integer, group_breaker_cooldown interval, group_budget double precision,
  group_budget_period interval,
  user_weight double precision not null default 1, user_max_running integer,
  user_rate_limit integer, user_rate_period interval, user_rate_burst integer,
  user_breaker_threshold integer, user_breaker_cooldown interval,
  max_running integer,
  rate_limit integer, rate_period interval, rate_burst integer,
  breaker_threshold integer, breaker_cooldown interval,
  short_slots integer, short_under double precision, short_idle interval,
  enqueue_role text collate "C", work_role text collate "C",
  metered boolean not null default false, spread boolean not null default false,
  internal boolean not null default false,
  paused_at timestamptz, draining_at timestamptz,
  constraint queue_name_in_range check (octet_length(queue) between 1 and 200)
);
comment on table fairq.queues is 'Queues and their settings. Change them with fairq.configure_queue().';
comment on column fairq.queues.ready_target is 'How many tasks a pass makes ready beside those it hands over; null: chosen by what other workers need.';
comment on column fairq.queues.max_attempts is 'Attempts of a task that names no number.';
comment on column fairq.queues.retry_base is 'Back-off before the second attempt; doubled for every further one.';
comment on column fairq.queues.retry_cap is 'The longest back-off.';
comment on column fairq.queues.retention is 'How long ended tasks and attempts are kept.';
comment on column fairq.queues.notify is 'Whether new work is announced by NOTIFY. NOTIFY takes a database-wide lock at commit; polling works without.';
comment on column fairq.queues.weight is 'Weight of groups without one of their own.';
comment on column fairq.queues.fairness is
  'What groups share: count (as many tasks for each, by cost), time (as many worker seconds) or cost (as much of what handlers charge).';
comment on column fairq.queues.group_max_running is 'The most tasks in flight at once for each group that has no cap of its own; null: no cap.';
comment on column fairq.queues.group_rate_limit is 'With group_rate_period: rate of each group that has none of its own; null: no limit.';
comment on column fairq.queues.group_rate_period is 'The period of group_rate_limit.';
comment on column fairq.queues.group_rate_burst is 'How many tasks of a group may go ahead of its rate; null: a second''s worth, at least one.';
comment on column fairq.queues.group_breaker_threshold is
  'Failures in a row that open the breaker of a group that has no setting of its own; null: no breaker.';
comment on column fairq.queues.group_breaker_cooldown is 'How long such a breaker stays open before it tries one task.';
comment on column fairq.queues.group_budget is
  'The most that the tasks of each group that has no budget of its own use per group_budget_period, in what groups share; null: no budget.';
comment on column fairq.queues.group_budget_period is 'The period of group_budget.';
comment on column fairq.queues.user_weight is 'Weight, inside their group, of users without one of their own.';
comment on column fairq.queues.user_max_running is 'The most tasks in flight at once for each user of a group that has no cap of its own; null: no cap.';
comment on column fairq.queues.user_rate_limit is 'With user_rate_period: rate of each user that has none of its own; null: no limit.';
comment on column fairq.queues.user_rate_period is 'The period of user_rate_limit.';
comment on column fairq.queues.user_rate_burst is 'How many tasks of a user may go ahead of its rate; null: a second''s worth, at least one.';
comment on column fairq.queues.user_breaker_threshold is 'Failures in a row that open the breaker of a user that has no setting of its own; null: no breaker.';
comment on column fairq.queues.user_breaker_cooldown is 'How long such a breaker stays open before it tries one task.';
comment on column fairq.queues.max_running is 'The most tasks of the whole queue in flight at once; null: no cap.';
comment on column fairq.queues.rate_limit is 'Tasks of the whole queue per rate_period; null: no limit.';
comment on column fairq.queues.rate_period is 'The period of rate_limit.';
comment on column fairq.queues.rate_burst is 'How many tasks of the whole queue may go ahead of its rate; null: a second''s worth, at least one.';
comment on column fairq.queues.breaker_threshold is 'Failures in a row, of any group, that open the breaker of the whole queue; null: no breaker.';
comment on column fairq.queues.breaker_cooldown is 'How long that breaker stays open before it tries one task.';
comment on column fairq.queues.short_slots is 'How many slots of its workers are kept for short tasks; null: none.';
comment on column fairq.queues.short_under is 'The expected cost of a short task is at most this: seconds, where groups share time; null: 1.';
comment on column fairq.queues.short_idle is 'How long those slots may idle while only long tasks wait.';
comment on column fairq.queues.metered is 'The queue or the cluster has a cap, a rate or a breaker: pops ask the meters.';
comment on column fairq.queues.spread is
  'There are several shards: a pop asks the hindmost first, and promotion checks whether the groups that it hears of have their home in its shard.';
comment on column fairq.queues.enqueue_role is 'Only its members create tasks of the queue; null: whoever may call create_task.';
comment on column fairq.queues.work_role is 'Only its members pop tasks of the queue; null: whoever may call pop_tasks.';
comment on column fairq.queues.internal is 'Not for tasks: its lanes count the places of concurrency keys (#keys), or of the cluster (#cluster).';
comment on column fairq.queues.paused_at is 'When the queue was paused; null: it is not.';
comment on column fairq.queues.draining_at is 'Since when the queue refuses new tasks, to run empty; null: it takes them.';

create table fairq.moving (
  group_key text collate "C" primary key,
  shard_no integer not null, tried_at timestamptz, leaving_at timestamptz
);
comment on table fairq.moving is 'Groups that have not yet moved to the shard of their key, see fairq.move_groups().';
comment on column fairq.moving.shard_no is 'Where the group is.';
comment on column fairq.moving.tried_at is 'When it was last tried.';
comment on column fairq.moving.leaving_at is 'Since when none of its tasks starts: it moves when those in flight have ended.';

create table fairq.kinds (
  queue text collate "C" not null, kind text collate "C" not null,
  max_attempts integer, priority integer, cost double precision, timeout interval,
  owner text,
  primary key (queue, kind)
);
comment on table fairq.kinds is 'What is declared for the tasks of a kind, once for all of them. Change it with fairq.configure_kind().';
comment on column fairq.kinds.max_attempts is 'The most attempts of a task of this kind; it may ask for fewer.';
comment on column fairq.kinds.priority is 'Priority of a task that names none.';
comment on column fairq.kinds.cost is 'Cost of a task that names none.';
comment on column fairq.kinds.timeout is 'Longest run of one attempt of a task that names no timeout.';
comment on column fairq.kinds.owner is 'The app that declares it; no other app may change it.';

create table fairq.groups (
  shard_no integer not null, queue text collate "C" not null, group_key text collate "C" not null,
  user_key text collate "C" not null default '',
  weight double precision, max_running integer,
  rate_limit integer, rate_period interval, rate_burst integer,
  breaker_threshold integer, breaker_cooldown interval,
  user_weight double precision, user_max_running integer,
  user_rate_limit integer, user_rate_period interval, user_rate_burst integer,
  user_breaker_threshold integer, user_breaker_cooldown interval,
  budget double precision, budget_period interval,
  paused_at timestamptz, leaving_at timestamptz,
  primary key (shard_no, queue, group_key, user_key)
);
comment on table fairq.groups is
  'Groups with settings of their own. A group needs no row here: without one it has the settings of its queue. Concurrency keys have theirs here, too, as '
  'groups of #keys.';
comment on column fairq.groups.user_key is 'The user whose settings these are; empty: they are the group''s own.';
comment on column fairq.groups.user_weight is 'Weight of those users of the group who have none of their own; null: the queue''s.';
comment on column fairq.groups.user_max_running is 'The most tasks in flight at once for each of those users.';
comment on column fairq.groups.user_rate_limit is 'Tasks per user_rate_period for each of those users.';
comment on column fairq.groups.user_rate_period is 'The period of user_rate_limit.';
comment on column fairq.groups.user_rate_burst is 'How many tasks of each of those users may go ahead of that rate.';
comment on column fairq.groups.user_breaker_threshold is 'Failures in a row that open the breaker of one of those users.';
comment on column fairq.groups.user_breaker_cooldown is 'How long it stays open before it tries one task.';
comment on column fairq.groups.max_running is 'The most tasks in flight at once.';
comment on column fairq.groups.rate_limit is 'Tasks per rate_period.';
comment on column fairq.groups.rate_period is 'The period of rate_limit.';
comment on column fairq.groups.rate_burst is 'How many tasks may go ahead of the rate; null: a second''s worth, at least one.';
comment on column fairq.groups.breaker_threshold is 'Failures in a row that open the breaker.';
comment on column fairq.groups.breaker_cooldown is 'How long the breaker stays open before it tries one task.';
comment on column fairq.groups.budget is 'The most that its tasks use per budget_period, in what the groups of the queue share.';
comment on column fairq.groups.budget_period is 'The period of the budget; periods are counted from the beginning of 1970 in UTC.';
comment on column fairq.groups.paused_at is 'When the group was paused; null: it is not.';
comment on column fairq.groups.leaving_at is 'Since when it is about to move to another shard: none of its tasks starts meanwhile.';

-- A row "is not null" only when all its fields are: so ask whether a policy "is distinct from null".
create type fairq.policy as (
  max_running integer, paused_at timestamptz, rate_seconds double precision, rate_burst integer, breaker_threshold integer, breaker_cooldown interval,
  budget double precision, budget_seconds double precision
);
comment on type fairq.policy is 'What limits a group: its own settings, else its queue''s. See _policy, _allowance, _charge, _settle.';

create type fairq.gate as (
  in_flight integer, uncounted integer, rate_at timestamptz, failures integer, open_until timestamptz, probe_until timestamptz,
  spent double precision, spent_until timestamptz, held_until timestamptz, held_by bigint
);
comment on type fairq.gate is
  'Where a group stands with its limits: places taken, also by tasks that are not counted yet (uncounted, see _adopt); when its rate is paid for; its breaker; '
  'what was spent of its budget in the period that ends at spent_until; until when it is held, and by which task.';

create type fairq.estimate as (kind text, tasks integer, used double precision, cost double precision);
comment on type fairq.estimate is
  'What the tasks of a kind used, where groups share that: how many were measured, the mean of the last ones, and the mean of the costs that they were created '
  'with.';

create type fairq.pace as (last_block bigint, credit bigint, estimates fairq.estimate[], unit text, reserved double precision);
comment on type fairq.pace is
  'What the tasks of a group use, where groups share that. last_block: the block of its last address, behind which no correction goes; credit: what could not '
  'be given back yet for that reason; estimates: per kind, in seconds or in what is charged; unit: the fairness of the queue; reserved: what its ready and '
  'held tasks were charged.';

create type fairq.allowance as (tasks integer, look_at timestamptz, reason text);
comment on type fairq.allowance is 'How many more tasks may go, when to look again if none, and why not more.';

create table fairq.domains (
  shard_no integer not null,
  queue text collate "C" not null,
  primary key (shard_no, queue)
);
comment on table fairq.domains is
  'One row per shard and queue, never updated: its row lock makes promotion one at a time. Unlike an advisory lock, it is held on the node that has the data.';

-- The tables of the hot path have no check constraints: PostgreSQL parses each of them anew for every statement that writes, which took a third of the time of
-- create_task. Only the functions of this schema write here, and the tests add the checks (tests/support/checks.sql).
create table fairq.tasks (
  shard_no integer not null, priority integer not null, id bigint not null, sequence bigint not null,
  created_at timestamptz not null, run_at timestamptz, expires_at timestamptz,
  cost double precision not null,
  attempt integer not null default 0, max_attempts integer not null,
  spared integer, losses integer,
  scheduled boolean not null default false,
  queue text collate "C" not null, group_key text collate "C" not null,
  user_key text collate "C" not null default '',
  kind text collate "C" not null, timeout interval,
  idempotency_key text collate "C", concurrency_key text collate "C",
  headers jsonb, payload jsonb not null,
  constraint tasks_pkey primary key (shard_no, id)
) with (toast_tuple_target = 4096);
comment on table fairq.tasks is 'Bodies of live tasks: what the application asked for. The truth; with fairq.held everything else can be rebuilt from it.';
comment on column fairq.tasks.user_key is 'The user of the group whose task it is; empty: it names none.';
comment on column fairq.tasks.sequence is 'Order in which the tasks of a group became runnable. A task that comes back keeps it.';
comment on column fairq.tasks.run_at is 'The task does not start before this time: as asked, or the end of the back-off; null: it may start at once.';
comment on column fairq.tasks.expires_at is 'The deadline: after it the task does not start.';
comment on column fairq.tasks.scheduled is 'The task waits for run_at; otherwise it is in line.';
comment on column fairq.tasks.attempt is 'Attempts begun before the present one, spared ones included.';
comment on column fairq.tasks.max_attempts is 'Number of the last attempt that it may have: as asked, and one more for each spared attempt.';
comment on column fairq.tasks.spared is 'Attempts that do not count: given back, or lost with their worker; null: none.';
comment on column fairq.tasks.losses is
  'How often it was lost with its worker since one of its attempts last ended by itself; null: never. Such a task runs alone.';
comment on column fairq.tasks.timeout is 'Longest run time of one attempt; enforced by the worker.';

create table fairq.ready (
  shard_no integer not null, attempt integer not null, id bigint not null,
  block bigint not null, position bigint not null,
  charge double precision, expires_at timestamptz, keyed_at timestamptz,
  counted boolean not null, long boolean, user_counted boolean not null,
  queue text collate "C" not null, group_key text collate "C" not null, user_key text collate "C" not null,
  user_block bigint,
  constraint ready_pkey primary key (shard_no, id)
);
comment on table fairq.ready is 'Tasks that may be popped, in served order: few, whatever the backlog. Derived.';
comment on column fairq.ready.block is 'Block address: virtual start time, 2^20 units per round.';
comment on column fairq.ready.position is 'Order inside the block: the lane''s position, or, for a newcomer, one before the lane that is next.';
comment on column fairq.ready.charge is
  'What its group was charged beforehand, where groups share what tasks use; the end of the attempt settles the difference.';
comment on column fairq.ready.expires_at is 'The deadline: after it the task is not handed out.';
comment on column fairq.ready.attempt is 'The number of its next attempt.';
comment on column fairq.ready.counted is 'The task takes one of its group''s places.';
comment on column fairq.ready.long is 'The task has one of the slots that long tasks may have.';
comment on column fairq.ready.user_counted is 'The task takes one of its user''s places.';
comment on column fairq.ready.user_block is 'Its address among the users of its group, in their own virtual time; null: the group has no users.';
comment on column fairq.ready.keyed_at is 'Since when the task is ready with a place of its concurrency key; null: it has no place.';

create table fairq.held (
  shard_no integer not null, attempt integer not null, id bigint not null, worker_id bigint not null,
  started_at timestamptz, lease_expires_at timestamptz,
  charge double precision, meters integer not null, counted boolean not null, user_counted boolean not null,
  keyed boolean not null,
  constraint held_pkey primary key (shard_no, id)
);
comment on table fairq.held is
  'Who has a task, and which places it takes. When it leaves, it gives back what its row here says. Replaced, never updated: the row at a ctid never changes.';
comment on column fairq.held.attempt is 'With worker_id it proves who holds the task, so no number is used twice.';
comment on column fairq.held.started_at is 'When the attempt began; null: the task is claimed, not started.';
comment on column fairq.held.lease_expires_at is 'End of the claim lease of a prefetched task; null: it runs, or waits to run alone.';
comment on column fairq.held.charge is 'What its group was charged beforehand, where groups share what tasks use.';
comment on column fairq.held.meters is 'Sum of what the task has: a place of its queue (1), a place of the cluster (2), a slot that long tasks may have (4).';
comment on column fairq.held.counted is 'The task holds one of its group''s places.';
comment on column fairq.held.user_counted is 'The task holds one of its user''s places.';
comment on column fairq.held.keyed is 'The task has a place of its concurrency key.';

create table fairq.parked (
  shard_no integer not null, priority integer not null, id bigint not null, sequence bigint not null,
  turn bigint, granted boolean not null default false,
  queue text collate "C" not null, group_key text collate "C" not null, user_key text collate "C" not null,
  concurrency_key text collate "C" not null,
  constraint parked_pkey primary key (shard_no, id)
);
comment on table fairq.parked is
  'Tasks whose concurrency key had no place when their turn came, and long ones for which no slot was free. They leave the line until they are granted one. '
  'Derived.';
comment on column fairq.parked.concurrency_key is
  'The key that it waits for; empty: it is a long task that waits for a slot, and has the place of its key, if it has one.';
comment on column fairq.parked.turn is
  'When the group''s turn at this key is, in virtual time of the key (for long tasks, of the queue). Only the first task of each group has it.';
comment on column fairq.parked.granted is 'The task was given a place of its key, or a slot, and has it until it leaves this table.';

-- What promotion found for a task, on its way to ready or straight to held.
create type fairq.placed as (
  id bigint, block bigint, position bigint, charge double precision, counted boolean, keyed boolean, priority integer, sequence bigint,
  group_key text, attempt integer, expires_at timestamptz, ready tid, long boolean, user_key text, user_block bigint, user_counted boolean,
  cost double precision
);
comment on type fairq.placed is
  'A task with its address. ready is its place in fairq.ready; null: it was just promoted, and is not there. A task from fairq.ready has no priority and '
  'sequence here.';

create type fairq.popped as (
  shard_no integer, id bigint, attempt integer, max_attempts integer, queue text, group_key text, kind text, priority integer, cost double precision,
  created_at timestamptz, run_at timestamptz, expires_at timestamptz, started_at timestamptz, lease_expires_at timestamptz, timeout interval,
  idempotency_key text, concurrency_key text, headers jsonb, payload jsonb, block bigint, position bigint, spared integer, losses integer, user_key text
);
comment on type fairq.popped is 'A task as its worker gets it: the body, the attempt, and the address at which it was served.';

create type fairq.turned as (
  ended bigint[], started bigint[], due_in double precision, id bigint, attempt integer, max_attempts integer, queue text,
  group_key text, kind text, started_at timestamptz, timeout interval, headers jsonb, payload jsonb, spared integer, losses integer, user_key text
);
comment on type fairq.turned is 'The answer to fairq.turn(): a row for each task, then one row of what was accepted.';

create type fairq.leaving as (
  id bigint, body tid, held tid, ready tid, parked tid, ends boolean, outcome text, result jsonb, error jsonb, delay interval, hold text,
  run_at timestamptz, attempt integer,
  worker_id bigint, started_at timestamptz, charge double precision, used double precision, meters integer, counted boolean, keyed boolean,
  user_counted boolean
);
comment on type fairq.leaving is 'A task that leaves flight: where its rows are, what they hold, and how it leaves. See _leave.';

create table fairq.finished_tasks (
  shard_no integer not null, priority integer not null, id bigint not null, worker_id bigint,
  created_at timestamptz not null, run_at timestamptz, expires_at timestamptz,
  started_at timestamptz, finished_at timestamptz not null,
  cost double precision not null, used double precision,
  attempt integer not null, max_attempts integer not null,
  queue text collate "C" not null, outcome text collate "C" not null, group_key text collate "C" not null,
  user_key text collate "C",
  kind text collate "C" not null, timeout interval,
  idempotency_key text collate "C", concurrency_key text collate "C",
  headers jsonb, payload jsonb not null,
  result jsonb, error jsonb
) partition by range (finished_at);
comment on table fairq.finished_tasks is 'Ended tasks, partitioned by day; days beyond the retention are dropped by fairq.maintain().';
create table fairq.finished_tasks_default partition of fairq.finished_tasks default with (toast_tuple_target = 4096);
alter table fairq.finished_tasks_default replica identity full;
comment on table fairq.finished_tasks_default is 'Rows of days that have no partition yet.';

create table fairq.attempts (
  shard_no integer not null, task_id bigint not null, worker_id bigint,
  started_at timestamptz, ended_at timestamptz not null,
  used double precision, attempt integer not null, outcome text collate "C" not null, error jsonb
) partition by range (ended_at);
comment on column fairq.finished_tasks.used is 'What it used, where groups share that: seconds, or what its handler charged; null: the handler did not say.';
comment on column fairq.finished_tasks.worker_id is 'Who ended it; null: it never ran.';
comment on column fairq.finished_tasks.started_at is 'When its last attempt began.';
comment on column fairq.finished_tasks.attempt is 'Attempts begun, spared ones included.';
comment on column fairq.finished_tasks.user_key is 'Whose task it was among those of its group; null: it named nobody.';
comment on column fairq.finished_tasks.outcome is 'succeeded, failed, cancelled or expired.';
comment on column fairq.finished_tasks.result is 'What the handler returned, if that is stored.';
comment on column fairq.finished_tasks.error is 'Why it failed; fairq''s workers write code and message.';
comment on table fairq.attempts is 'Attempts that did not end their task: append-only, partitioned by day.';
comment on column fairq.attempts.outcome is 'retry, worker_lost, released, declined, postponed or lease_expired.';
comment on column fairq.attempts.error is 'Why, if the worker said so.';
comment on column fairq.attempts.used is 'As of finished_tasks.';
create table fairq.attempts_default partition of fairq.attempts default;
alter table fairq.attempts_default replica identity full;
comment on table fairq.attempts_default is 'Rows of days that have no partition yet.';

create table fairq.rings (
  shard_no integer not null, freed integer not null default 0,
  xid xid8 not null default pg_current_xact_id(), ring_id bigint not null default nextval('fairq.ring_ids'),
  sequence bigint, due_at timestamptz, cancelled_id bigint, priority integer,
  failures integer not null default 0, succeeded boolean not null default false,
  keyed boolean not null default false,
  configured boolean not null default false, announced boolean not null default false,
  queue text collate "C" not null, group_key text collate "C" not null, user_key text collate "C",
  used double precision, charged double precision,
  hold_until timestamptz, held_by bigint, ran fairq.estimate
);
alter table fairq.rings replica identity full;
comment on table fairq.rings is
  'Rings: notes "look at this group". Append-only; promotion hears each exactly once, by transaction id, without touching it; fairq.maintain() sweeps them.';
comment on column fairq.rings.user_key is
  'The user of the group that the ring is about; empty: tasks that name no user; null: the group itself, or tasks that name no user.';
comment on column fairq.rings.xid is 'The transaction that rings: a promotion''s snapshot sees it, or lists it as pending.';
comment on column fairq.rings.ring_id is 'Tells the rings before a transaction''s own promotion from those after it.';
comment on column fairq.rings.sequence is
  'With priority: the first task announced, to which the lane''s cursor goes back. Without: a parked task that was granted a place or a slot.';
comment on column fairq.rings.due_at is 'A task was scheduled for this time: look again then.';
comment on column fairq.rings.freed is 'Places that came free in a group with a cap.';
comment on column fairq.rings.failures is 'Failed attempts of a group with limits, since the last that succeeded.';
comment on column fairq.rings.succeeded is 'An attempt of a group with limits succeeded.';
comment on column fairq.rings.used is
  'What ended attempts used, where groups share that; null with charged: a rebuild says what tasks in flight were charged, as a negative number.';
comment on column fairq.rings.charged is 'What their group was charged for them beforehand.';
comment on column fairq.rings.hold_until is 'No task of the group, or with the key, starts before this time.';
comment on column fairq.rings.held_by is 'The task that asked for the hold; null: an operator did.';
comment on column fairq.rings.ran is 'What the attempts of a kind used.';
comment on column fairq.rings.announced is 'A NOTIFY goes with it. Until this ring is heard, no other NOTIFY is needed.';
comment on column fairq.rings.keyed is 'Some of the tasks announced have a concurrency key.';
comment on column fairq.rings.configured is 'The limits of the group changed: its ready tasks go back in line. With an empty group_key: those of all groups.';
comment on column fairq.rings.cancelled_id is 'The task to cancel, if it is waiting.';

create type fairq.cursor as (priority integer, sequence bigint, touched bigint, is_open boolean);
comment on type fairq.cursor is
  'A priority level of a lane: no task of this priority waits before sequence; those after touched all wait; for those between, a look-up decides. An open '
  'cursor stands for all lower levels, too.';

create type fairq.news as (
  group_key text, freed integer, failures integer, succeeded boolean, keyed boolean, configured boolean, first_sequence bigint, heard fairq.cursor[],
  used double precision, charged double precision, correction double precision, ran fairq.estimate[], hold bigint[], user_key text,
  pace fairq.pace, lines integer, line text, looks text[]
);
comment on type fairq.news is
  'What the new rings of a group, or of a user of it, say together, see _hear. pace: what a new user is expected to use. For a group: lines: of how many of '
  'its users they are; line: one of those with tasks; looks: those whose settings changed.';

create type fairq.heard as (xid xid8, ring_id bigint);
comment on type fairq.heard is 'A transaction, and the last of its rings that was heard.';

create type fairq.inside as (clock bigint, position bigint, top bigint);
comment on type fairq.inside is
  'The order inside a group that has users, in a virtual time of its own: the address of the users'' next task, where newcomers among them start; and their '
  'highest finish tag.';

create table fairq.lanes (
  shard_no integer not null,
  last_priority integer not null default 0, last_sequence bigint not null default 0,
  lane_no bigint not null, version bigint not null, finish bigint not null, position bigint not null,
  weight double precision not null, look_at timestamptz,
  admissible boolean not null, keyed boolean not null default false,
  queue text collate "C" not null, group_key text collate "C" not null,
  user_key text collate "C" not null default '',
  line text collate "C" not null default '',
  cursors fairq.cursor[] not null, policy fairq.policy, gate fairq.gate, pace fairq.pace, inside fairq.inside,
  constraint lanes_pkey primary key (shard_no, queue, group_key, user_key, version)
);
comment on table fairq.lanes is
  'A group''s state in the engine. Replaced (insert version n+1, delete version n), never updated: the newest version is one index step away however many dead '
  'ones lie behind it.';
comment on column fairq.lanes.user_key is 'The user whose lane it is, under the queue that _users_of names; empty: it is the group''s own.';
comment on column fairq.lanes.line is
  'The user whose tasks its cursors are about: the lane''s own, or, in a group without an order inside, the only user with tasks; empty: tasks that name no '
  'user.';
comment on column fairq.lanes.inside is
  'Where the order inside the group has come, once several of its users have had tasks. Then the users'' lanes have the cursors; the group''s only say that '
  'one of them may go on.';
comment on column fairq.lanes.lane_no is 'Number of the lane in its domain, in the order in which lanes appeared: it gives the position in every block.';
comment on column fairq.lanes.finish is 'Finish tag: where in virtual time the group''s next task may start. Of a concurrency key: its clock.';
comment on column fairq.lanes.position is 'Position of the group''s next task.';
comment on column fairq.lanes.policy is 'What limits the group; null: nothing.';
comment on column fairq.lanes.gate is 'Where the group stands with its limits; in_flight counts its tasks that are ready or held.';
comment on column fairq.lanes.pace is 'What the group''s tasks use; null: groups of the queue share by count.';
comment on column fairq.lanes.look_at is
  'Its waiting tasks may not be promoted before this time. Of a counter: until when it is held; else, of a concurrency key, since when no place of it is '
  'taken.';
comment on column fairq.lanes.keyed is 'Some of its waiting tasks have a concurrency key.';
comment on column fairq.lanes.admissible is 'It has waiting tasks that may be promoted now.';
comment on column fairq.lanes.cursors is
  'Where its waiting tasks begin, for each priority, highest first; empty: it has none. A cursor behind all tasks: a parked task was granted a place or a '
  'slot.';
comment on column fairq.lanes.last_sequence is 'Sequence of the task promoted last, see last_priority.';
comment on column fairq.lanes.last_priority is 'Priority of the task promoted last: a task before it in line that comes later, or comes back, overtakes it.';

create type fairq.share as (lane fairq.lanes, replaces tid, quota integer, reach bigint, room bigint);
comment on type fairq.share is
  'A lane, where its stored version is, how many tasks it may have, up to which block it may take places of keys (reach), and up to which its budget lasts '
  '(room).';

create type fairq.drawn as (
  lane fairq.lanes, replaces tid, quota integer, tasks fairq.placed[], expired bigint[], next fairq.cursor, served bigint, touched bigint, keyed boolean,
  yields boolean, timed boolean
);
comment on type fairq.drawn is 'What a lane gave: its tasks, those that had expired, where it goes on, and how far it has come in virtual time.';

create table fairq.ticks (
  shard_no integer not null, written_by xid not null default pg_current_xact_id()::xid, tick bigint not null,
  clock bigint not null, clock_position bigint not null, newcomer_position bigint not null,
  top bigint not null,
  horizon bigint, horizon_position bigint,
  refill_block bigint, refill_position bigint,
  next_xid xid8 not null, heard_xid xid8 not null, heard_ring bigint not null,
  next_due_at timestamptz,
  lane_count bigint not null, touched bigint not null, first_version bigint not null,
  announce_from bigint, filled integer not null,
  keyed boolean not null default false, long_since timestamptz, long_turn bigint, long_top bigint,
  users boolean not null default false,
  queue text collate "C" not null, pending fairq.heard[] not null,
  constraint ticks_pkey primary key (shard_no, queue, tick),
  constraint horizon_is_whole check ((horizon is null) = (horizon_position is null))
);
comment on table fairq.ticks is 'What promotion has seen and decided, append-only, read newest first.';
comment on column fairq.ticks.written_by is
  'Transaction that wrote this row. After a dump is restored it differs from the row''s xmin: then next_xid and pending mean nothing, and the engine rebuilds '
  'its state.';
comment on column fairq.ticks.clock is
  'The block being served. With clock_position it is the address before which no task is ever ready again: the lower bound of every scan of the ready set.';
comment on column fairq.ticks.top is 'The highest finish tag ever given, where the clock goes when no task is left.';
comment on column fairq.ticks.horizon is
  'With horizon_position, the address of the first task not yet promoted; null: all are. Tasks beyond it are not popped, so no group is overtaken.';
comment on column fairq.ticks.horizon_position is 'Position that goes with horizon.';
comment on column fairq.ticks.clock_position is 'Position that goes with clock: right after the lane served last in that block, or a newcomer''s.';
comment on column fairq.ticks.filled is 'Tasks put into the ready set since pops passed the middle of it.';
comment on column fairq.ticks.refill_position is 'Position that goes with refill_block.';
comment on column fairq.ticks.newcomer_position is 'The position last given to a newcomer in the block of the clock.';
comment on column fairq.ticks.refill_block is 'With refill_position, an address: when pops get there, the ready set is half empty.';
comment on column fairq.ticks.next_xid is 'Rings of this transaction and later ones are new.';
comment on column fairq.ticks.pending is 'Earlier transactions that were still running, or were heard in part: their other rings are new, too.';
comment on column fairq.ticks.touched is 'The highest sequence ever taken out of the line: every task after it certainly waits.';
comment on column fairq.ticks.first_version is 'Lanes of lower versions are from before a rebuild, and do not count.';
comment on column fairq.ticks.announce_from is 'After a rebuild: bodies from this id on are still to be announced; null: all are.';
comment on column fairq.ticks.heard_xid is
  'A transaction at or past next_xid whose rings were heard up to heard_ring: the one that wrote the tick, which its own snapshot does not list; 0: none.';
comment on column fairq.ticks.heard_ring is 'The last ring heard of that transaction.';
comment on column fairq.ticks.next_due_at is 'When the next scheduled task becomes due.';
comment on column fairq.ticks.keyed is 'Some tasks of the domain have concurrency keys: promotion takes the lock of the keys, too.';
comment on column fairq.ticks.long_since is 'Since when only long tasks wait, for a slot; null: none does.';
comment on column fairq.ticks.long_turn is 'The turn of the long task that was given a slot last: no task with an earlier turn waits.';
comment on column fairq.ticks.long_top is 'The highest finish tag to which a long task that was given a slot led.';
comment on column fairq.ticks.users is 'Some groups of the domain have users.';
comment on column fairq.ticks.lane_count is 'Lane numbers given out.';

create table fairq.idempotency_keys (
  shard_no integer not null, task_id bigint not null, created_at timestamptz not null,
  queue text collate "C" not null, group_key text collate "C" not null,
  idempotency_key text collate "C" not null,
  fingerprint text not null,
  primary key (shard_no, queue, group_key, idempotency_key)
);
comment on table fairq.idempotency_keys is 'Keys in use, per group: a second create_task with the same key and payload gets the id of the first.';
comment on column fairq.idempotency_keys.fingerprint is 'md5 of kind and payload: the same key for another task is an error.';

create table fairq.cancellations (
  shard_no integer not null, task_id bigint not null, requested_at timestamptz not null,
  unless_held boolean not null default false
);
alter table fairq.cancellations replica identity full;
comment on table fairq.cancellations is 'Wishes to cancel, append-only: promotion ends waiting tasks, a holder learns of its own with the heartbeat.';
comment on column fairq.cancellations.unless_held is
  'Another task takes the place of this one: if it has begun it is left alone, until it is to be tried again.';

create table fairq.watches (
  shard_no integer not null, task_id bigint not null, until timestamptz not null
);
alter table fairq.watches replica identity full;
comment on table fairq.watches is 'Tasks whose end somebody waits for, append-only: only the end of these is announced.';
comment on column fairq.watches.until is 'When the watch runs out unless it is renewed: whoever waits may be gone.';

create table fairq.workers (
  shard_no integer not null, slots integer not null, worker_id bigint not null,
  registered_at timestamptz not null, lease interval not null, lost_at timestamptz,
  name text not null, registered_by text not null,
  queues text[] not null, kinds jsonb,
  primary key (shard_no, worker_id),
  constraint slots_positive check (slots >= 1),
  constraint lease_positive check (lease > interval '0')
);
comment on table fairq.workers is 'Workers that are alive, or lost and not yet removed.';
comment on column fairq.workers.kinds is 'The kinds that it knows, each with the most attempts that it declares, or null; null: it did not say.';
comment on column fairq.workers.registered_by is 'The role that registered it: calls of other roles may not name it.';
comment on column fairq.workers.lost_at is 'When it was given up as lost: since then its calls are refused.';
comment on column fairq.workers.lease is 'A worker without a heartbeat for this long is lost; its tasks go to others.';

create table fairq.heartbeats (
  shard_no integer not null, worker_id bigint not null, beat_at timestamptz not null,
  circuit_open boolean not null default false, circuit_trips integer not null default 0,
  primary key (shard_no, worker_id, beat_at)
);
comment on table fairq.heartbeats is 'Signs of life. Replaced, never updated; the newest is read.';
comment on column fairq.heartbeats.circuit_open is 'The worker''s circuit breaker is open: its turns fail, and it leaves the database alone for some seconds.';
comment on column fairq.heartbeats.circuit_trips is 'How often that breaker has opened since the worker started.';

create table fairq.progress (
  shard_no integer not null, task_id bigint not null,
  reported_at timestamptz not null, attempt integer not null,
  done double precision, total double precision, used double precision,
  note jsonb,
  primary key (shard_no, task_id, reported_at)
);
comment on table fairq.progress is 'The progress that running tasks report. Replaced, never updated; the newest is read.';
comment on column fairq.progress.done is 'How much is done, in units of the handler''s choice; null: it only reported what it used.';
comment on column fairq.progress.total is 'How much there is to do; null: unknown.';
comment on column fairq.progress.used is 'What the attempt has used so far: this counts if it is lost.';
comment on column fairq.progress.note is 'Anything else the handler says.';

-- Not on the hot path: a row is updated once per tick.
create table fairq.schedules (
  shard_no integer not null,
  priority integer, created_at timestamptz not null,
  done_until timestamptz not null,
  next_tick timestamptz, fire_at timestamptz, plan_at timestamptz,
  paused_at timestamptz,
  last_tick timestamptz, last_task_id bigint,
  every interval, spread interval, delay interval not null default '0',
  name text collate "C" not null, group_key text collate "C" not null, owner text collate "C",
  cron text collate "C", time_zone text collate "C" not null default 'UTC',
  missed text collate "C" not null default 'last',
  queue text collate "C" not null default 'default', kind text collate "C" not null default 'default',
  concurrency_key text collate "C",
  problem text, ticks timestamptz[] not null default '{}',
  headers jsonb, payload jsonb not null default 'null',
  primary key (shard_no, name, group_key)
);
comment on table fairq.schedules is 'What recurs: a task per tick, of one group. Change them with fairq.configure_schedule().';
comment on column fairq.schedules.name is 'Schedules of several groups may have one name.';
comment on column fairq.schedules.owner is 'The app that declares it; null: none does.';
comment on column fairq.schedules.cron is 'Five fields; a caller that can read them plans the ticks ahead. Null: every says when.';
comment on column fairq.schedules.time_zone is 'The time zone of cron.';
comment on column fairq.schedules.every is 'A tick at each multiple of this time since 1970; null: cron says when.';
comment on column fairq.schedules.missed is
  'What happens with ticks that were not fired in time: last (only the last one fires), skip (none that is a minute late does), all (each of the last 100 '
  'does).';
comment on column fairq.schedules.spread is 'Each group fires at a time of its own within this time after the tick; null: at the tick.';
comment on column fairq.schedules.delay is 'The group''s part of the spread: how long after the tick it fires.';
comment on column fairq.schedules.done_until is 'Ticks up to this one are dealt with.';
comment on column fairq.schedules.next_tick is 'The first tick after done_until; null: none is planned.';
comment on column fairq.schedules.fire_at is 'When its task is created: next_tick plus delay; null: it is paused, or no tick is planned.';
comment on column fairq.schedules.ticks is 'With cron: the ticks as they were planned, ascending; those dealt with may be among them.';
comment on column fairq.schedules.plan_at is 'With cron: when the plan is to be renewed.';
comment on column fairq.schedules.paused_at is 'When it was paused; null: it is not.';
comment on column fairq.schedules.last_tick is 'The last tick that became a task.';
comment on column fairq.schedules.last_task_id is 'The task of the last tick, or of the last run by hand.';
comment on column fairq.schedules.problem is 'Why the last tick became no task, or why no tick can be planned; null: all is well.';

create type fairq.unplanned as (name text, group_key text, cron text, time_zone text, done_until timestamptz, now timestamptz);
comment on type fairq.unplanned is 'A schedule whose ticks after done_until are to be planned, and what time it is.';

create table fairq.sweeps (
  shard_no integer not null, floor bigint not null, what text collate "C" not null,
  primary key (shard_no, what, floor)
);
comment on table fairq.sweeps is
  'How far fairq.maintain() has come, per kind of sweep: the next sweep starts there, not at the dead rows of the past. Replaced, never updated.';
comment on column fairq.sweeps.what is 'The kind of sweep, with the queue if there is one per queue.';
comment on column fairq.sweeps.floor is 'All before it has been swept: a transaction id, a tick, a block or a time in microseconds.';

create table fairq.upkeep_failures (
  shard_no integer not null, part text collate "C" not null,
  failed_since timestamptz not null, failed_at timestamptz not null, message text not null,
  primary key (shard_no, part)
);
comment on table fairq.upkeep_failures is 'Parts of fairq.maintain() that failed when they were last run, and since when.';
comment on column fairq.upkeep_failures.part is 'One of fairq.upkeep_parts().';
comment on column fairq.upkeep_failures.failed_since is 'When it first failed; the row is removed when it succeeds.';
comment on column fairq.upkeep_failures.failed_at is 'When it last failed.';
comment on column fairq.upkeep_failures.message is 'The error.';

create table fairq.ledger (
  shard_no integer not null, groups integer not null,
  begins_at timestamptz not null, until timestamptz not null, waiting_since timestamptz,
  weight double precision not null, tasks bigint not null, ended bigint not null,
  cost double precision not null, seconds double precision not null, ran double precision not null,
  service double precision not null, entitled double precision not null, largest double precision not null,
  slack double precision not null,
  judged boolean not null,
  queue text collate "C" not null, group_key text collate "C" not null,
  waits bigint[] not null,
  constraint ledger_pkey primary key (shard_no, begins_at, queue, group_key)
);
comment on table fairq.ledger is
  'Who got what: a row per half minute and group that had work, for the 200 groups that got or waited most; the group '''' is all others together. '
  'Append-only.';
comment on column fairq.ledger.groups is '1; for the others: how many they are, with at most 5,000 that only wait.';
comment on column fairq.ledger.begins_at is 'When the half minute began.';
comment on column fairq.ledger.until is 'When it ended.';
comment on column fairq.ledger.waiting_since is 'Since when, at that time, its next task had waited; null: none waited.';
comment on column fairq.ledger.weight is 'Weight of the group; for the others: of those that waited.';
comment on column fairq.ledger.tasks is 'Attempts that began.';
comment on column fairq.ledger.ended is 'Attempts that ended.';
comment on column fairq.ledger.seconds is 'Worker seconds in this half minute, also of attempts that began before or end later.';
comment on column fairq.ledger.ran is 'How long the attempts that ended ran, in seconds.';
comment on column fairq.ledger.service is 'What it received of what groups share: cost of attempts that began, seconds, or what handlers charged.';
comment on column fairq.ledger.entitled is 'What it was entitled to of all service: by weight, but no more than it asked for.';
comment on column fairq.ledger.largest is 'Its largest task, in the unit of service.';
comment on column fairq.ledger.slack is
  'Service that is charged and not counted yet: that of claimed tasks; where groups share what tasks use, that of all in flight or ready, or, if more, what '
  'the group has had and not yet paid for.';
comment on column fairq.ledger.judged is 'It had work waiting all the time, and nothing but its turn held it back: the fairness bound holds.';
comment on column fairq.ledger.waits is 'A histogram: how many of the tasks that began had waited less than 5 ms, 10 ms, 20 ms and so on; the last: longer.';

create table fairq.ledger_queues (
  shard_no integer not null, workers integer not null, slots integer not null,
  begins_at timestamptz not null, until timestamptz not null, waiting_since timestamptz,
  tasks bigint not null, ended bigint not null, seconds double precision not null,
  ran double precision not null, clock double precision not null, judged boolean not null,
  queue text collate "C" not null,
  waits bigint[] not null, newcomers bigint[] not null,
  constraint ledger_queues_pkey primary key (shard_no, begins_at, queue)
);
comment on table fairq.ledger_queues is 'The ledger of whole queues: a row per half minute and queue that had work. Append-only.';
comment on column fairq.ledger_queues.workers is 'Workers of the queue.';
comment on column fairq.ledger_queues.slots is 'What they can run at once.';
comment on column fairq.ledger_queues.clock is 'How far the order had come when this was written, in rounds.';
comment on column fairq.ledger_queues.newcomers is 'Like waits, for the first tasks of groups that had no work before.';

create table fairq.totals (
  shard_no integer not null,
  tasks bigint not null, seconds double precision not null, waited double precision not null,
  queue text collate "C" not null, kind text collate "C" not null, outcome text collate "C" not null,
  runs bigint[] not null, waits bigint[] not null,
  constraint totals_pkey primary key (shard_no, queue, kind, outcome)
);
comment on table fairq.totals is 'All tasks that ever ended, counted with the ledger: these numbers never go down, whatever becomes of the history.';
comment on column fairq.totals.tasks is 'How many.';
comment on column fairq.totals.kind is 'A hundred kinds of a queue are told apart; other is the rest.';
comment on column fairq.totals.seconds is 'How long their last attempts ran.';
comment on column fairq.totals.waited is 'How long they had waited, in seconds.';
comment on column fairq.totals.runs is 'A histogram: how many ran less than 5 ms, 10 ms, 20 ms and so on; the last: longer.';
comment on column fairq.totals.waits is 'How many had waited so long, by the same steps.';

create table fairq.ledger_marks (
  shard_no integer not null, marked_at timestamptz not null, snapshot pg_snapshot not null,
  constraint ledger_marks_pkey primary key (shard_no, marked_at)
);
comment on table fairq.ledger_marks is
  'Snapshots of the last minutes: they tell which tasks waited at a time, and when all that ended before it can be counted.';
comment on column fairq.ledger_marks.marked_at is 'When the snapshot was taken.';
comment on column fairq.ledger_marks.snapshot is 'Which transactions had committed.';

create table fairq.limit_changes (
  shard_no integer not null, until timestamptz not null,
  queue text collate "C" not null, group_key text collate "C" not null
);
alter table fairq.limit_changes replica identity full;
comment on table fairq.limit_changes is
  'Groups whose limits changed, or that were held, in the last minutes: the ledger does not judge them then. Append-only.';
comment on column fairq.limit_changes.until is 'When the limits changed, or when the hold ends.';

create type fairq.tally as (
  group_key text, kind text, outcome text, began boolean, ended boolean, claimed boolean, wait_class integer, run_class integer, attempts bigint,
  cost double precision, seconds double precision, ran double precision, waited double precision, largest double precision, longest double precision,
  used double precision, most_used double precision, first_at timestamptz, first_start timestamptz
);
comment on type fairq.tally is 'Attempts of a group that are alike, in a queue and a part of the ledger.';

create type fairq.account as (
  shard_no integer, group_key text, groups integer, weight double precision, tasks bigint, ended bigint, seconds double precision, cost double precision,
  ran double precision, received double precision, entitled double precision, debt double precision, bound double precision, pace double precision,
  waiting_since timestamptz
);
comment on type fairq.account is 'What the ledger of a time says about a group; pace: what it was entitled to per second in which it waited.';

create type fairq.waiter as (
  group_key text, since timestamptz, cost double precision, weight double precision, is_free boolean, most integer, ready integer, ahead double precision,
  before double precision
);
comment on type fairq.waiter is
  'A group: since when its next task waits, and its expected cost; is_free: it waited all the time with nothing but its turn before it; most: its cap; ahead: '
  'what it still has to pay for; before: what would be left of what it had to pay for half a minute ago.';

create table fairq.maintenance (
  shard_no integer primary key
);
comment on table fairq.maintenance is 'One row per shard, never updated: its row lock lets one fairq.maintain() run at a time.';
