-- 0001_initial: the whole engine, as it was when fairq was first released.
--
-- Why:       the first revision; there is nothing before it.
-- Locks:     none that anybody could wait for; every object is new.
-- Rewrites:  nothing.
-- Beforehand: schema fairq may be created by an administrator; the role that migrates must be its owner.
--
-- Frozen from sql/ by tools/freeze.py. DO NOT EDIT: change sql/, then freeze.

-- Function bodies refer to functions that come later in this file.
set local check_function_bodies = off;

-- sql/schema/010_schema.sql

comment on schema fairq is 'fairq: a multi-tenant fair queue. Applications append, the engine moves, policy acts at promotion, order acts at pop.';

-- sql/schema/020_helpers.sql

-- Constants and arithmetic. Tiny, immutable, without "set search_path": so they are inlined into the statements that use them.

create function fairq._round() returns bigint
language sql
immutable
parallel safe
as $$ select 1048576::bigint $$;
comment on function fairq._round() is
  'Length of one round of the round robin in units of the virtual time: a task of cost 1 in a group of weight 1 moves its group by this much.';

create function fairq._rounds(p_distance bigint) returns double precision
language sql
immutable
parallel safe
as $$ select p_distance::double precision / fairq._round() $$;
comment on function fairq._rounds(bigint) is 'A distance in virtual time as a number of rounds.';

create function fairq._step(p_cost double precision, p_weight double precision) returns bigint
language sql
immutable
parallel safe
as $$ select least(1099511627776, greatest(1, ceil(fairq._round() * p_cost / p_weight)))::bigint $$;
comment on function fairq._step(double precision, double precision) is
  'How far a task moves its group in virtual time. At least one unit, so two tasks of a group never share an address; at most 2^20 rounds, so that a million tasks ahead fit in a bigint.';

create function fairq._lane_position(p_lane_no bigint) returns bigint
language sql
immutable
parallel safe
as $$ select p_lane_no << 20 $$;
comment on function fairq._lane_position(bigint) is
  'Position of a lane in its blocks. Between two lanes there is room for 2^20 newcomers, who are served as soon as they come.';

create function fairq._gap_end(p_position bigint) returns bigint
language sql
immutable
parallel safe
as $$ select ((p_position >> 20) + 1 << 20) - 1 $$;
comment on function fairq._gap_end(bigint) is 'The last position before the next lane.';

create function fairq._shard_of(p_group_key text, p_shard_count integer) returns integer
language sql
immutable
parallel safe
as $$
  select case
    when p_shard_count = 1 then 0
    else (('x' || left(md5(p_group_key), 15))::bit(60)::bigint % p_shard_count)::integer
  end
$$;
comment on function fairq._shard_of(text, integer) is
  'The shard of a group: the first 60 bits of the md5 of its key, modulo the number of shards. Frozen: stored tasks depend on it.';

create function fairq._is_span(p_time interval, p_longest interval) returns boolean
language sql
immutable
parallel safe
as $$
  select p_time between interval '0' and p_longest and abs(extract(year from p_time)) <= 100 and abs(extract(day from p_time)) <= 36525
$$;
comment on function fairq._is_span(interval, interval) is
  'Whether an interval is neither negative nor longer than another one. Its parts are looked at, too: a thousand years less so many days may be short, and is out of range as soon as it is added to a time.';

create function fairq._now() returns timestamptz
language sql
volatile
parallel safe
as $$ select coalesce(nullif(current_setting('fairq.now', true), '')::timestamptz, clock_timestamp()) $$;
comment on function fairq._now() is
  'The one clock of the engine: the wall clock, or the session setting fairq.now, which only tests set. Never now(): a lease must not stand still in a long transaction.';

-- sql/schema/030_tables.sql

-- Lock order of the engine. Whoever needs several of these takes them from top to bottom:
--   1. idempotency_keys     create_task, equal keys wait for each other; nothing else waits here
--   2. domains              promotion, one at a time per (shard, queue); only these row locks are ever waited for by the engine. A pop that asks the
--                           meters locks #meters before the queue; a promotion that meets concurrency keys locks the queue before #keys
--   3. tasks                overflow, blocked and scheduled rows change only under the domain's lock;
--                           queued rows leave by pop or promotion, both "skip locked";
--                           claimed and running rows change by their holder, or by recovery with "skip locked"
--   4. lanes, ticks         written under the domain's lock only
-- Everything an application's transaction touches (tasks, rings, cancellations) it only inserts.
--
-- Tables without a primary key have "replica identity full": where somebody publishes all tables of the database, a row without an identity could not
-- be deleted any more. Unlike a key it costs nothing, unless wal_level is logical; then a deleted row is logged as it was.
--
-- shard_no is the first column of every key and every index, and every hot statement names it: no call touches two shards.
-- settings and queues are the same everywhere (reference tables, should the shards ever live on several machines).

create sequence fairq.task_ids;
comment on sequence fairq.task_ids is 'Ids of tasks, and the order in which tasks of a group became runnable.';

create sequence fairq.worker_ids;
comment on sequence fairq.worker_ids is 'Ids of workers. Never reused, so a late message of a lost worker names nobody else.';

create sequence fairq.ring_ids;
comment on sequence fairq.ring_ids is 'Order of the rings of one transaction; compared within a transaction only.';

create table fairq.settings (
  singleton boolean primary key default true,
  shard_count integer not null default 1,
  payload_limit integer not null default 1048576,
  constraint settings_has_one_row check (singleton),
  constraint shard_count_in_range check (shard_count between 1 and 4096),
  constraint payload_limit_in_range check (payload_limit between 1 and 268435456)
);
comment on table fairq.settings is 'Settings of the whole installation, one row. Change them with fairq.configure_cluster().';
comment on column fairq.settings.shard_count is 'Number of shards. Fixed once tasks exist.';
comment on column fairq.settings.payload_limit is 'Largest payload that create_task accepts, in bytes of its text form.';

create table fairq.queues (
  queue text collate "C" primary key,
  ready_target integer,
  max_attempts integer not null default 5,
  retry_base interval not null default '1 second',
  retry_cap interval not null default '10 minutes',
  retention interval not null default '7 days',
  notify boolean not null default true,
  weight double precision not null default 1,
  fairness text collate "C" not null default 'count',
  group_max_running integer,
  group_rate_limit integer,
  group_rate_period interval,
  group_rate_burst integer,
  group_breaker_threshold integer,
  group_breaker_cooldown interval,
  metered boolean not null default false,
  internal boolean not null default false,
  paused_at timestamptz,
  draining_at timestamptz,
  constraint queue_name_in_range check (octet_length(queue) between 1 and 200),
  constraint ready_target_positive check (ready_target >= 1),
  constraint max_attempts_positive check (max_attempts >= 1),
  constraint retry_base_not_negative check (retry_base >= interval '0'),
  constraint retry_cap_not_negative check (retry_cap >= interval '0'),
  constraint retention_not_negative check (retention >= interval '0'),
  constraint weight_in_range check (weight between 0.001 and 1000),
  constraint fairness_is_known check (fairness in ('count', 'time')),
  constraint group_max_running_not_negative check (group_max_running >= 0),
  constraint group_rate_is_whole check ((group_rate_limit is null) = (group_rate_period is null)),
  constraint group_breaker_is_whole check ((group_breaker_threshold is null) = (group_breaker_cooldown is null))
);
comment on table fairq.queues is 'Queues and their settings. Change them with fairq.configure_queue().';
comment on column fairq.queues.ready_target is 'How many tasks are kept queued, ready to be popped; null: four times the slots of the live workers, at least 1000 (50 where groups share time).';
comment on column fairq.queues.max_attempts is 'Attempts of a task that names no number of its own.';
comment on column fairq.queues.retry_base is 'Back-off before the second attempt; doubled for every further one.';
comment on column fairq.queues.retry_cap is 'Longest back-off.';
comment on column fairq.queues.retention is 'How long ended tasks and attempts are kept.';
comment on column fairq.queues.notify is 'Whether new work is announced by NOTIFY. NOTIFY takes a database-wide lock at commit; polling works without.';
comment on column fairq.queues.weight is 'Weight of groups that have none of their own.';
comment on column fairq.queues.fairness is
  'What groups share: count, so that each gets as many tasks (costs, rather) as the others; time, so that each gets as many worker seconds.';
comment on column fairq.queues.group_max_running is 'Most tasks in flight at once for each group that has no cap of its own; null: no cap.';
comment on column fairq.queues.group_rate_limit is 'With group_rate_period: rate of each group that has none of its own; null: no limit.';
comment on column fairq.queues.group_rate_period is 'The period of group_rate_limit.';
comment on column fairq.queues.group_rate_burst is 'How many tasks of a group may go ahead of its rate; null: a second''s worth, at least one.';
comment on column fairq.queues.group_breaker_threshold is 'Failures in a row that open the breaker of a group that has no setting of its own; null: no breaker.';
comment on column fairq.queues.group_breaker_cooldown is 'How long such a breaker stays open before it tries one task.';
comment on column fairq.queues.metered is 'The queue or the cluster has a cap, a rate or a breaker: pops ask the meters.';
comment on column fairq.queues.internal is 'Not for tasks: its lanes count the places of concurrency keys (#keys), or of queues and the cluster (#meters).';
comment on column fairq.queues.paused_at is 'When the queue was paused; null: it is not.';
comment on column fairq.queues.draining_at is 'Since when the queue refuses new tasks, to run empty; null: it takes them.';

create table fairq.groups (
  shard_no integer not null,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  weight double precision,
  max_running integer,
  rate_limit integer,
  rate_period interval,
  rate_burst integer,
  breaker_threshold integer,
  breaker_cooldown interval,
  paused_at timestamptz,
  primary key (shard_no, queue, group_key),
  constraint weight_in_range check (weight between 0.001 and 1000),
  constraint max_running_not_negative check (max_running >= 0),
  constraint rate_is_whole check ((rate_limit is null) = (rate_period is null)),
  constraint breaker_is_whole check ((breaker_threshold is null) = (breaker_cooldown is null))
);
comment on table fairq.groups is
  'Groups with settings of their own. Groups need no row here: unknown ones have the settings of their queue. Concurrency keys, queues and the cluster have theirs here, too, as groups of #keys and #meters.';
comment on column fairq.groups.max_running is 'Most tasks in flight at once.';
comment on column fairq.groups.rate_limit is 'Tasks per rate_period.';
comment on column fairq.groups.rate_period is 'The period of rate_limit.';
comment on column fairq.groups.rate_burst is 'How many tasks may go ahead of the rate; null: a second''s worth, at least one.';
comment on column fairq.groups.breaker_threshold is 'Failures in a row that open the breaker.';
comment on column fairq.groups.breaker_cooldown is 'How long the breaker stays open before it tries one task.';
comment on column fairq.groups.paused_at is 'When the group was paused; null: it is not.';

-- A row "is not null" only when all its fields are: ask whether a policy "is distinct from null".
create type fairq.policy as (
  max_running integer,
  paused_at timestamptz,
  rate_seconds double precision,
  rate_burst integer,
  breaker_threshold integer,
  breaker_cooldown interval
);
comment on type fairq.policy is 'What limits a group: its own settings, else its queue''s. See _policy, _allowance, _charge, _settle.';

create type fairq.gate as (
  in_flight integer,
  rate_at timestamptz,
  failures integer,
  open_until timestamptz,
  probe_until timestamptz
);
comment on type fairq.gate is 'Where a group stands with its limits: places taken, rate used, breaker.';

create type fairq.estimate as (
  kind text,
  tasks integer,
  seconds double precision
);
comment on type fairq.estimate is 'How long the tasks of a kind ran: how many were measured, and the mean of the last ones.';

create type fairq.pace as (
  last_block bigint,
  credit bigint,
  estimates fairq.estimate[]
);
comment on type fairq.pace is 'What the tasks of a group take, where groups share time: its estimates; the block of its last address, which no correction goes behind; and what could not be given back yet for that reason.';

create type fairq.allowance as (
  tasks integer,
  look_at timestamptz,
  reason text
);
comment on type fairq.allowance is 'How many more tasks, when to look again if none, and why not more.';

create table fairq.domains (
  shard_no integer not null,
  queue text collate "C" not null,
  primary key (shard_no, queue)
);
comment on table fairq.domains is
  'One row per shard and queue, never updated: its row lock makes promotion one at a time. Unlike an advisory lock it is held on the node where the data is.';

-- The tables of the hot path have no check constraints: PostgreSQL parses each of them anew for every statement that writes, which was a third of
-- create_task. Nothing but the functions of this schema writes here, and the tests add the checks (tests/support/checks.sql).
create table fairq.tasks (
  shard_no integer not null,
  priority integer not null,
  id bigint not null,
  sequence bigint not null,
  block bigint,
  position bigint,
  worker_id bigint,
  created_at timestamptz not null,
  run_at timestamptz not null,
  expires_at timestamptz,
  started_at timestamptz,
  lease_expires_at timestamptz,
  cost double precision not null,
  charge double precision,
  attempt integer not null default 0,
  max_attempts integer not null,
  meters integer not null default 0,
  counted boolean not null default false,
  queue text collate "C" not null,
  state text collate "C" not null,
  group_key text collate "C" not null,
  kind text collate "C" not null,
  timeout interval,
  idempotency_key text collate "C",
  concurrency_key text collate "C",
  headers jsonb,
  payload jsonb not null,
  constraint tasks_pkey primary key (shard_no, id)
);
comment on table fairq.tasks is 'Live tasks. The truth: lanes, rings and ticks can be rebuilt from it.';
comment on column fairq.tasks.sequence is 'Order in which the tasks of a group became runnable.';
comment on column fairq.tasks.block is 'Block address: virtual start time, 2^20 units per round. Kept while the task is held, for explanation only.';
comment on column fairq.tasks.position is 'Order inside the block: the lane''s position, or a newcomer''s before the lane that is next.';
comment on column fairq.tasks.run_at is 'Not before this time: as asked, or the end of the back-off.';
comment on column fairq.tasks.expires_at is 'Past this time the task is not started any more.';
comment on column fairq.tasks.lease_expires_at is 'End of the claim lease of a prefetched task.';
comment on column fairq.tasks.attempt is 'Attempts begun, those given back included. Together with worker_id the fencing token of a holder, so never given out twice.';
comment on column fairq.tasks.max_attempts is 'Number of the last attempt it may have: as asked, and one more for each that was given back.';
comment on column fairq.tasks.counted is 'The task holds one of its group''s places; its end is reported to the lane.';
comment on column fairq.tasks.meters is 'The task holds a place of its queue (1), of the cluster (2).';
comment on column fairq.tasks.charge is 'Seconds charged to its group when it was promoted, where groups share time; the end of the attempt reports the difference.';
comment on column fairq.tasks.timeout is 'Longest run time of one attempt; enforced by the worker.';

create table fairq.finished_tasks (
  shard_no integer not null,
  priority integer not null,
  id bigint not null,
  worker_id bigint,
  created_at timestamptz not null,
  run_at timestamptz not null,
  expires_at timestamptz,
  started_at timestamptz,
  finished_at timestamptz not null,
  cost double precision not null,
  attempt integer not null,
  max_attempts integer not null,
  queue text collate "C" not null,
  outcome text collate "C" not null,
  group_key text collate "C" not null,
  kind text collate "C" not null,
  timeout interval,
  idempotency_key text collate "C",
  concurrency_key text collate "C",
  headers jsonb,
  payload jsonb not null,
  result jsonb,
  error jsonb
) partition by range (finished_at);
comment on table fairq.finished_tasks is 'Ended tasks, partitioned by day; days beyond the retention are dropped by fairq.maintain().';
create table fairq.finished_tasks_default partition of fairq.finished_tasks default;
alter table fairq.finished_tasks_default replica identity full;
comment on table fairq.finished_tasks_default is 'Catches what has no day of its own yet.';

create table fairq.attempts (
  shard_no integer not null,
  task_id bigint not null,
  worker_id bigint,
  started_at timestamptz,
  ended_at timestamptz not null,
  attempt integer not null,
  outcome text collate "C" not null,
  error jsonb
) partition by range (ended_at);
comment on table fairq.attempts is 'Attempts that did not end their task: append-only, partitioned by day.';
create table fairq.attempts_default partition of fairq.attempts default;
alter table fairq.attempts_default replica identity full;
comment on table fairq.attempts_default is 'Catches what has no day of its own yet.';

create table fairq.rings (
  shard_no integer not null,
  freed integer not null default 0,
  xid xid8 not null default pg_current_xact_id(),
  ring_id bigint not null default nextval('fairq.ring_ids'),
  sequence bigint,
  due_at timestamptz,
  cancelled_id bigint,
  priority integer,
  failures integer not null default 0,
  succeeded boolean not null default false,
  keyed boolean not null default false,
  announced boolean not null default false,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  correction double precision,
  ran fairq.estimate
);
alter table fairq.rings replica identity full;
comment on table fairq.rings is
  'Doorbells: "look at this group". Append-only; promotion consumes each exactly once, by transaction id, without touching it; fairq.maintain() sweeps them.';
comment on column fairq.rings.xid is 'The transaction that rings: visible to a promotion''s snapshot or still pending.';
comment on column fairq.rings.ring_id is 'Tells apart what a transaction rang before and after a promotion of its own.';
comment on column fairq.rings.sequence is 'With priority: the first task announced; lowers the lane''s cursor.';
comment on column fairq.rings.due_at is 'A scheduled task was added: look again at this time.';
comment on column fairq.rings.freed is 'Places that came free in a group with a cap.';
comment on column fairq.rings.failures is 'Attempts of a group with limits that failed, after the last that succeeded.';
comment on column fairq.rings.succeeded is 'An attempt of a group with limits succeeded.';
comment on column fairq.rings.correction is 'Seconds that attempts took beyond what their group was charged for them; less than nothing: it was charged too much.';
comment on column fairq.rings.ran is 'How long the attempts of a kind ran.';
comment on column fairq.rings.announced is 'A NOTIFY goes with it. Until it is heard, no other one is needed.';
comment on column fairq.rings.keyed is 'Some of the tasks announced have a concurrency key.';
comment on column fairq.rings.cancelled_id is 'The task to cancel, while it is waiting.';

create type fairq.cursor as (priority integer, sequence bigint);
comment on type fairq.cursor is 'A priority level of a lane: no overflow task of this priority lies before the sequence.';

create table fairq.lanes (
  shard_no integer not null,
  last_priority integer not null default 0,
  lane_no bigint not null,
  version bigint not null,
  finish bigint not null,
  position bigint not null,
  weight double precision not null,
  look_at timestamptz,
  admissible boolean not null,
  keyed boolean not null default false,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  cursors fairq.cursor[] not null,
  policy fairq.policy,
  gate fairq.gate,
  pace fairq.pace,
  constraint lanes_pkey primary key (shard_no, queue, group_key, version)
);
comment on table fairq.lanes is
  'A group''s state in the engine. Replaced (insert version n+1, delete version n), never updated: the newest version is one index step away however many dead ones lie behind it.';
comment on column fairq.lanes.lane_no is 'Number of the lane in its domain, in order of first appearance: it gives the position in every block.';
comment on column fairq.lanes.finish is 'Finish tag: where in virtual time the group''s next task starts, at the earliest.';
comment on column fairq.lanes.position is 'Position of the group''s next task.';
comment on column fairq.lanes.policy is 'What limits the group; null: nothing.';
comment on column fairq.lanes.gate is 'Where it stands with its limits; in_flight counts its tasks that are queued, claimed or running.';
comment on column fairq.lanes.pace is 'How long its tasks take; null: groups of the queue share by count.';
comment on column fairq.lanes.look_at is 'It has overflow that may not be promoted before this time.';
comment on column fairq.lanes.keyed is 'Some of its tasks have a concurrency key.';
comment on column fairq.lanes.admissible is 'Has overflow that may be promoted now.';
comment on column fairq.lanes.cursors is 'Where its overflow begins, per priority level, highest first; empty: it has none.';
comment on column fairq.lanes.last_priority is 'Priority of the task promoted last: a higher one that comes later overtakes it.';

create table fairq.ticks (
  shard_no integer not null,
  written_by xid not null default pg_current_xact_id()::xid,
  tick bigint not null,
  created_at timestamptz not null,
  clock bigint not null,
  clock_position bigint not null,
  newcomer_position bigint not null,
  top bigint not null,
  horizon bigint,
  horizon_position bigint,
  refill_block bigint,
  refill_position bigint,
  next_xid xid8 not null,
  heard_xid xid8 not null,
  heard_ring bigint not null,
  next_due_at timestamptz,
  lane_count bigint not null,
  filled integer not null,
  keyed boolean not null default false,
  queue text collate "C" not null,
  pending xid8[] not null,
  constraint ticks_pkey primary key (shard_no, queue, tick),
  constraint horizon_is_whole check ((horizon is null) = (horizon_position is null))
);
comment on table fairq.ticks is 'What promotion has seen and decided, append-only, read newest first.';
comment on column fairq.ticks.written_by is
  'Transaction that wrote this row. After a dump is restored it differs from the row''s xmin: the horizon below means nothing then, and the engine rebuilds its state.';
comment on column fairq.ticks.clock is
  'The block being served; with clock_position the address before which nothing is ever queued again: the lower bound of every scan of the ready index.';
comment on column fairq.ticks.top is 'Highest finish tag ever given: where the clock goes when nothing is left.';
comment on column fairq.ticks.horizon is 'Address of the first task not yet promoted; null: all are. Tasks beyond it are not popped, so no group is overtaken.';
comment on column fairq.ticks.horizon_position is 'Position of that address.';
comment on column fairq.ticks.clock_position is 'Position that goes with the clock: right after the lane served last in that block, or a newcomer''s.';
comment on column fairq.ticks.filled is 'Tasks promoted since pops passed the middle of the ready set.';
comment on column fairq.ticks.refill_position is 'Position that goes with refill_block.';
comment on column fairq.ticks.newcomer_position is 'The position last given to a newcomer in the block of the clock.';
comment on column fairq.ticks.refill_block is 'With refill_position: when pops get here the ready set is half empty.';
comment on column fairq.ticks.next_xid is 'Rings of this transaction and later ones are new.';
comment on column fairq.ticks.pending is 'Earlier transactions that were still running: their rings are new as well.';
comment on column fairq.ticks.heard_xid is 'The transaction that wrote the tick: no snapshot lists it, and of its own rings it has heard those up to heard_ring.';
comment on column fairq.ticks.heard_ring is 'The last ring heard of the transaction that wrote the tick.';
comment on column fairq.ticks.next_due_at is 'When the next scheduled task becomes due.';
comment on column fairq.ticks.keyed is 'Some tasks of the domain have concurrency keys: promotion takes the lock of the keys, too.';
comment on column fairq.ticks.lane_count is 'Lane numbers given out.';

create table fairq.idempotency_keys (
  shard_no integer not null,
  task_id bigint not null,
  created_at timestamptz not null,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  idempotency_key text collate "C" not null,
  fingerprint text not null,
  primary key (shard_no, queue, group_key, idempotency_key)
);
comment on table fairq.idempotency_keys is 'Keys in use, per group: a second create_task with the same key and payload gets the id of the first.';
comment on column fairq.idempotency_keys.fingerprint is 'md5 of kind and payload: the same key with another task is an error.';

create table fairq.cancellations (
  shard_no integer not null,
  task_id bigint not null,
  requested_at timestamptz not null
);
alter table fairq.cancellations replica identity full;
comment on table fairq.cancellations is 'Wishes to cancel, append-only: promotion ends waiting tasks, holders learn of theirs with the heartbeat.';

create table fairq.watches (
  shard_no integer not null,
  task_id bigint not null,
  until timestamptz not null
);
alter table fairq.watches replica identity full;
comment on table fairq.watches is 'Tasks whose end somebody waits for, append-only: only these are announced when they end.';
comment on column fairq.watches.until is 'When the watch runs out, unless it is renewed: who waits may be gone.';

create table fairq.workers (
  shard_no integer not null,
  slots integer not null,
  worker_id bigint not null,
  registered_at timestamptz not null,
  lease interval not null,
  name text not null,
  queues text[] not null,
  primary key (shard_no, worker_id),
  constraint slots_positive check (slots >= 1),
  constraint lease_positive check (lease > interval '0')
);
comment on table fairq.workers is 'Workers that are alive, or not yet known to be lost. Rows never change.';
comment on column fairq.workers.lease is 'A worker without a heartbeat for this long is lost; its tasks go to others.';

create table fairq.heartbeats (
  shard_no integer not null,
  worker_id bigint not null,
  beat_at timestamptz not null,
  primary key (shard_no, worker_id, beat_at)
);
comment on table fairq.heartbeats is 'Signs of life. Replaced, never updated; the newest is read.';

create table fairq.progress (
  shard_no integer not null,
  task_id bigint not null,
  reported_at timestamptz not null,
  attempt integer not null,
  done double precision,
  total double precision,
  note jsonb,
  primary key (shard_no, task_id, reported_at)
);
comment on table fairq.progress is 'How far running tasks say they are. Replaced, never updated; the newest is read.';
comment on column fairq.progress.done is 'How much is done, in units of the handler''s choice.';
comment on column fairq.progress.total is 'How much there is to do; null: unknown.';
comment on column fairq.progress.note is 'Anything else the handler says.';

create table fairq.sweeps (
  shard_no integer not null,
  floor bigint not null,
  what text collate "C" not null,
  primary key (shard_no, what, floor)
);
comment on table fairq.sweeps is
  'How far fairq.maintain() has come, per kind of sweep: the next one starts there, not at the dead rows of the past. Replaced, never updated.';
comment on column fairq.sweeps.what is 'The kind of sweep, with the queue where there is one per queue.';
comment on column fairq.sweeps.floor is 'Everything before it has been swept: a transaction id, a tick, a block or a time in microseconds.';

create table fairq.maintenance (
  shard_no integer primary key
);
comment on table fairq.maintenance is 'One row per shard, never updated: its row lock lets one fairq.maintain() run at a time.';

insert into fairq.settings default values;
insert into fairq.queues (queue, internal, group_max_running) values ('default', false, null), ('#keys', true, 1), ('#meters', true, null);
insert into fairq.domains (shard_no, queue) values (0, 'default'), (0, '#keys'), (0, '#meters');
insert into fairq.maintenance (shard_no) values (0);

-- sql/schema/040_indexes.sql

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

-- sql/schema/050_views.sql

create view fairq.queue_stats as
select q.queue,
  count(*) filter (where t.state = 'scheduled') as scheduled,
  count(*) filter (where t.state = 'overflow') as overflow,
  count(*) filter (where t.state = 'blocked') as blocked,
  count(*) filter (where t.state = 'queued') as queued,
  count(*) filter (where t.state = 'claimed') as claimed,
  count(*) filter (where t.state = 'running') as running,
  count(distinct t.group_key) filter (where t.state in ('overflow', 'blocked', 'queued')) as waiting_groups,
  min(greatest(t.created_at, t.run_at)) filter (where t.state in ('overflow', 'queued')) as oldest_waiting_since
from fairq.queues q
left join fairq.tasks t on t.queue = q.queue
where not q.internal
group by q.queue;
comment on view fairq.queue_stats is 'Live tasks per queue and state. Counts all live tasks: for people and dashboards, not for a tight loop.';

create view fairq.group_stats as
select t.queue, t.group_key,
  count(*) filter (where t.state = 'scheduled') as scheduled,
  count(*) filter (where t.state = 'overflow') as overflow,
  count(*) filter (where t.state = 'blocked') as blocked,
  count(*) filter (where t.state = 'queued') as queued,
  count(*) filter (where t.state = 'claimed') as claimed,
  count(*) filter (where t.state = 'running') as running,
  min(greatest(t.created_at, t.run_at)) filter (where t.state in ('overflow', 'queued')) as oldest_waiting_since
from fairq.tasks t
group by t.queue, t.group_key;
comment on view fairq.group_stats is 'Live tasks per queue, group and state. Counts all live tasks.';

create view fairq.worker_stats as
select w.worker_id, w.name, w.queues, w.slots, w.registered_at, w.lease,
  (select max(h.beat_at) from fairq.heartbeats h where h.shard_no = w.shard_no and h.worker_id = w.worker_id) as beat_at,
  (select count(*) from fairq.tasks t where t.shard_no = any(array(select d.shard_no from fairq.domains d)) and t.worker_id = w.worker_id) as held
from fairq.workers w
where w.shard_no = 0;
comment on view fairq.worker_stats is 'Workers, their last sign of life and how many tasks they hold.';

create view fairq.estimates as
select l.queue, l.group_key, e.kind, e.seconds, e.tasks
from fairq.lanes l
cross join lateral unnest((l.pace).estimates) as e(kind, tasks, seconds);
comment on view fairq.estimates is 'How long the tasks of a group and kind take, where groups share time: the mean of the last ones, and how many have been measured, up to 16.';

-- sql/functions/_admit.sql

-- Gives addresses to waiting tasks: overflow -> queued.
--
-- Candidates are the lanes just rung (p_lanes, not stored) and, when the ready set is short (p_refill), the waiting lanes from the last
-- tick's horizon on. They are filled like connected vessels: the level is the virtual time up to which all of them together have
-- p_budget tasks; a lane below it gets as many as fit, at least one. The prefix sums below give that level without a loop: for lanes in order of
-- their tags, (budget + sum(width * tag)) / sum(width) is smallest at the prefix that the water covers. The width of a lane is how many of its
-- tasks fit into a round: its weight; where groups share time, by the seconds that its last task was expected to take. Counted as a second each, a
-- refill of quick tasks would raise the level by minutes, and promote groups of slow ones as far ahead by their first guess.
--
-- A lane may get fewer tasks than others already have, and then the new horizon is its next task: pops stop there until the next
-- refill. So the served order is exact whatever the level was; the level only decides how much work a pass does.
--
-- One pass, lanes -> lateral tasks, and the new lane versions from the same rows: a join between these CTEs would be a nested loop, because
-- the planner expects one row of each. The tasks found are then updated by ctid, in _place: a join with fairq.tasks here could become a walk
-- through all tasks of the shard.
--
-- How many tasks a lane with limits may have, says _allowance, what they use up, _charge. In a lane whose tasks have concurrency keys,
-- _take_keys says which are next, and passes over those whose key is taken.
-- Which lanes these are was heard before; tasks are read now, and may have committed since. So a lane not known for keys ends before the first task that
-- has one, as if its share were used up: that task's ring is still to be heard. Placed without its key it would give back what it never took.
-- p_lanes are all written again. Expired tasks get no address; their ctids are returned for the caller to end.
-- Locks: tasks (overflow rows, which only the holder of the domain changes), lanes; the caller holds the domain.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_overflow_idx from each lane's cursor, tasks by ctid.
create function fairq._admit(
  p_tick fairq.ticks,
  p_lanes fairq.lanes[],
  p_refill boolean,
  p_budget integer,
  p_now timestamptz,
  out o_promoted integer,
  out o_top bigint,
  out o_middle bigint,
  out o_middle_position bigint,
  out o_horizon bigint,
  out o_horizon_position bigint,
  out o_expired tid[]
)
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
  v_blocks bigint[];
  v_positions bigint[];
  v_counted boolean[];
  v_charges double precision[];
  v_replaced tid[];
begin
  with waiting as (
    select l.ctid as replaces, l.lane_no, l.version, l.finish, l.position, l.weight, l.last_priority, l.look_at,
      l.admissible, l.keyed, l.group_key, l.cursors, l.policy, l.gate, l.pace
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.queue = p_tick.queue
      and l.admissible
      and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    order by l.finish, l.position
    limit 1 + case when p_refill then p_budget else 0 end
  ),
  candidate as materialized (
    select c.*, fairq._rounds(c.finish - p_tick.clock) as tag,
      c.weight / coalesce(((c.pace).estimates[1]).seconds, 1) as width,
      row_number() over (order by c.admissible desc, c.finish, c.position) as nth
    from (
      select null::tid as replaces, r.lane_no, r.version, r.finish, r.position, r.weight, r.last_priority, r.look_at,
        r.admissible, r.keyed, r.group_key, r.cursors, r.policy, r.gate, r.pace
      from unnest(p_lanes) r
      union all
      select w.* from waiting w
    ) c
  ),
  fence as materialized (
    -- The first lane that has to wait for another pass, and with it whatever comes after. Without a refill that is whoever stands at the
    -- horizon or behind it, lanes just rung as well, and who shares time and still has something ready: groups that ring all the time would
    -- be promoted ever further ahead, and pay for it by old estimates.
    select c.nth, c.tag
    from candidate c
    where c.admissible
      and (c.nth > p_budget
        or (not p_refill and (c.replaces is not null
          or (c.finish, c.position) >= (p_tick.horizon, p_tick.horizon_position)
          or (c.pace).last_block >= p_tick.clock)))
    order by c.nth
    limit 1
  ),
  water as materialized (
    select min(x.level) as level, least(min(x.level), min(x.fence)) as fenced, min(x.fence_nth) as fence_nth
    from (
      select (p_budget + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as level, f.tag as fence, f.nth as fence_nth
      from candidate c
      left join fence f on true
      where c.admissible
        and c.nth < coalesce(f.nth, 9223372036854775807)
      window by_tag as (order by c.nth)
    ) x
  ),
  share as (
    select c.*,
      case
        when c.admissible and c.tag < w.level and c.nth < coalesce(w.fence_nth, 9223372036854775807)
          then least(
            case when c.policy is distinct from null then (fairq._allowance(c.policy, c.gate, p_now)).tasks end,
            p_budget,
            greatest(1, ceil((w.fenced - c.tag) * c.width))
          )::integer
        else 0
      end as quota
    from candidate c
    left join water w on true
  ),
  chunk as materialized (
    select s.replaces, s.lane_no, s.version, s.finish, s.position, s.weight, s.last_priority, s.look_at, s.admissible,
      s.keyed, s.group_key, s.cursors, s.quota, s.policy,
      case when s.policy is distinct from null then fairq._charge(s.policy, s.gate, coalesce(k.taken, 0)::integer, p_now) else s.gate end as gate,
      fairq._last_block(s.pace, s.finish + k.last_start) as pace,
      k.ctids, k.starts, k.charges, coalesce(k.served, 0)::bigint as served, coalesce(k.taken, 0)::integer as taken, k.lowest_priority, k.expired, k.next
    from share s
    left join lateral (
      select
        array_agg(n.ctid) filter (where n.is_taken) as ctids,
        array_agg(n.start) filter (where n.is_taken) as starts,
        array_agg(n.charge) filter (where n.is_taken and n.charge is not null) as charges,
        max(n.start) filter (where n.is_taken) as last_start,
        sum(n.step) filter (where not n.is_next) as served,
        count(*) filter (where n.is_taken) as taken,
        min(n.priority) filter (where n.is_taken) as lowest_priority,
        array_agg(n.ctid) filter (where n.is_expired and not n.is_next) as expired,
        (array_agg((n.priority, n.sequence)::fairq.cursor) filter (where n.is_next))[1] as next
      from (
        select t.ctid, t.priority, t.sequence, t.is_expired, t.charge, t.step,
          row_number() over line > s.quota or bool_or(t.has_key) over line as is_next,
          not t.is_expired and row_number() over line <= s.quota and not bool_or(t.has_key) over line as is_taken,
          coalesce(sum(t.step) over (line rows between unbounded preceding and 1 preceding), 0)::bigint as start
        from (
          select y.*
          from fairq._next_tasks(p_tick.shard_no, p_tick.queue, s.group_key, s.cursors, s.weight, s.pace, s.quota + 1, p_now) y
          where not s.keyed
          union all
          select y.*, false
          from fairq._take_keys(p_tick, s.group_key, s.cursors, s.weight, s.pace, s.quota, p_now) y
          where s.keyed
        ) t
        window line as (order by t.priority desc, t.sequence)
        order by t.priority desc, t.sequence
        limit s.quota + 1
      ) n
    ) k on s.quota > 0
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority,
      cursors, look_at, admissible)
    select p_tick.shard_no, p_tick.queue, c.group_key, c.version + 1, c.lane_no, c.finish + c.served,
      case when c.taken > 0 then fairq._lane_position(c.lane_no) else c.position end,
      c.weight, c.keyed, c.policy, c.gate, c.pace,
      coalesce(c.lowest_priority, c.last_priority),
      -- Higher priorities are used up, the level of the next task begins with it, lower ones are untouched. Written out here:
      -- a function with a subquery would cost an executor start for every lane.
      case
        when c.quota = 0 then c.cursors
        when (c.next).sequence is null then '{}'
        when cardinality(c.cursors) = 1 then array[c.next]
        else array[c.next] || array(
          select u from unnest(c.cursors) u where u.priority < (c.next).priority order by u.priority desc
        )
      end,
      case when c.quota = 0 then c.look_at when (c.next).sequence is not null then (a.allowance).look_at end,
      case when c.quota = 0 then c.admissible else (c.next).sequence is not null and (c.policy is null or (a.allowance).tasks > 0) end
    from chunk c
    cross join lateral (
      select case when c.policy is distinct from null then fairq._allowance(c.policy, c.gate, p_now) end as allowance
      offset 0
    ) a
    where c.quota > 0
      or c.replaces is null
    returning finish, position, admissible
  ),
  horizon as materialized (
    select h.finish, h.position
    from (
      select w.finish, w.position from written w where w.admissible
      union all
      select c.finish, c.position from chunk c where c.replaces is not null and c.quota = 0
    ) h
    order by h.finish, h.position
    limit 1
  )
  select p.ctids, p.blocks, p.positions, p.counted, p.charges, (select greatest(p_tick.top, max(c.finish + c.served)) from chunk c),
    (select h.finish from horizon h), (select h.position from horizon h),
    (select array_agg(e.ctid) from chunk c cross join lateral unnest(c.expired) e(ctid)),
    (select array_agg(c.replaces) from chunk c where c.replaces is not null and c.quota > 0)
  into v_ctids, v_blocks, v_positions, v_counted, v_charges, o_top, o_horizon, o_horizon_position, o_expired, v_replaced
  from (
    select array_agg(m.ctid) as ctids, array_agg(m.block) as blocks, array_agg(m.position) as positions, array_agg(m.counted) as counted,
      array_agg(m.charge) as charges
    from (
      select u.ctid, c.finish + u.start as block, fairq._counts(c.policy) as counted, u.charge,
        case when u.start = 0 then c.position else fairq._lane_position(c.lane_no) end as position
      from chunk c
      cross join lateral unnest(c.ctids, c.starts, c.charges) as u(ctid, start, charge)
    ) m
  ) p;

  select m.block, m.position into o_middle, o_middle_position
  from unnest(v_blocks, v_positions) as m(block, position)
  order by m.block, m.position
  offset cardinality(v_blocks) / 2
  limit 1;

  o_top := coalesce(o_top, p_tick.top);
  o_promoted := case when v_ctids is null then 0 else fairq._place(p_tick.shard_no, v_ctids, v_blocks, v_positions, v_counted, v_charges) end;
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;
comment on function fairq._admit(fairq.ticks, fairq.lanes[], boolean, integer, timestamptz) is
  'Gives block addresses to the next tasks of the waiting lanes.';

-- sql/functions/_adopt.sql

-- Tasks in flight whose group gets its first limit, or loses its last: from now on they are counted, or no longer. The lane hears of those that came
-- to be counted as places taken (freed less than nothing), of the others as places freed. For all groups of the queue when p_group_key is null.
-- A queued task that is being popped is waited for; a held one that is being finished is leaving, and left alone.
-- Locks: tasks in flight; the caller holds the domain, so none is promoted meanwhile.
-- Cost: the ready set and all held tasks. For settings, not for the hot path.
create function fairq._adopt(p_shard_no integer, p_queue fairq.queues, p_group_key text) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_queued tid[];
  v_held tid[];
begin
  v_queued := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue.queue
      and t.state = 'queued'
      and (p_group_key is null or t.group_key = p_group_key)
    for update
  );
  v_held := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue.queue
      and t.worker_id is not null
      and (p_group_key is null or t.group_key = p_group_key)
    for update skip locked
  );
  with wanted as materialized (
    select t.ctid, t.group_key, fairq._counts(fairq._policy(p_queue, g)) as counted
    from fairq.tasks t
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = p_queue.queue and g.group_key = t.group_key
    where t.shard_no = p_shard_no
      and t.ctid = any(v_queued || v_held)
      and t.counted <> fairq._counts(fairq._policy(p_queue, g))
  ),
  changed as (
    update fairq.tasks t
    set counted = w.counted
    from wanted w
    where t.shard_no = p_shard_no
      and t.ctid = w.ctid
    returning t.group_key, t.counted
  )
  insert into fairq.rings (shard_no, queue, group_key, freed)
  select p_shard_no, p_queue.queue, c.group_key, sum(case when c.counted then -1 else 1 end)
  from changed c
  group by c.group_key;
end;
$$;
comment on function fairq._adopt(integer, fairq.queues, text) is 'Begins or ceases to count tasks in flight whose limits changed.';

-- sql/functions/_allowance.sql

-- The one place that says how many tasks a group may have promoted now, when to look again if none, and why not more. Promotion
-- uses the number and the time, explain_task the reason. A new policy is one more step here, one in _charge and one in _settle.
create function fairq._allowance(p_policy fairq.policy, p_gate fairq.gate, p_now timestamptz) returns fairq.allowance
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_allowed integer := 2147483647;
  v_rate_room double precision;
begin
  if p_policy.paused_at is not null then
    return (0, null, format('paused since %s', p_policy.paused_at))::fairq.allowance;
  end if;

  -- Breaker: closed, open, half open with one probe; a probe that is never heard of again times out.
  if p_gate.open_until > p_now then
    return (0, p_gate.open_until, format('its breaker is open until %s after %s failures in a row', p_gate.open_until, p_gate.failures))::fairq.allowance;
  end if;
  if p_gate.probe_until > p_now then
    return (0, p_gate.probe_until, 'its breaker is half open and waits for one task to end')::fairq.allowance;
  end if;
  if p_gate.open_until is not null then
    v_allowed := 1;
  end if;

  if p_policy.max_running is not null then
    v_allowed := least(v_allowed, p_policy.max_running - coalesce(p_gate.in_flight, 0));
    if v_allowed < 1 then
      return (0, null, format('%s tasks are in flight, the cap is %s', coalesce(p_gate.in_flight, 0), p_policy.max_running))::fairq.allowance;
    end if;
  end if;

  -- Rate (GCRA): rate_at is when the tasks so far are paid for; up to burst tasks may run ahead of it.
  if p_policy.rate_seconds is not null then
    v_rate_room := p_policy.rate_burst - greatest(0, extract(epoch from p_gate.rate_at - p_now)::double precision) / p_policy.rate_seconds;
    -- A millionth of a task makes up for what timestamps round away.
    v_allowed := least(v_allowed, floor(v_rate_room + 0.000001))::integer;
    if v_allowed < 1 then
      return (0, p_gate.rate_at - (p_policy.rate_burst - 1) * p_policy.rate_seconds * interval '1 second',
        format('rate limited until %s', p_gate.rate_at - (p_policy.rate_burst - 1) * p_policy.rate_seconds * interval '1 second'))::fairq.allowance;
    end if;
  end if;
  return (v_allowed, null, null)::fairq.allowance;
end;
$$;
comment on function fairq._allowance(fairq.policy, fairq.gate, timestamptz) is
  'How many more tasks may be promoted now, when to look again, and why not more.';

-- sql/functions/_announced.sql

-- Whether workers have been told by NOTIFY of something in this domain that no promotion has heard yet. Another NOTIFY would tell them nothing, and it is dear: it
-- takes a database-wide lock that is held until the commit is on disk, so all who notify commit one after the other.
-- A promotion that is under way may hear that ring and not the caller's. So NOTIFY is a hint: whoever sleeps looks again a few milliseconds
-- after it last found something, then after pauses that double (see the worker). Of a transaction open for as long it learns about as much later.
-- Only in READ COMMITTED: an older snapshot knows nothing of what was heard since, and what SERIALIZABLE reads here would make enqueuers fail for each other.
-- One look-up each in ticks and rings: of an open transaction one ring is announced at most, however many it has.
-- Stable, without "set search_path": inlined into the statement that asks.
create function fairq._announced(p_shard_no integer, p_queue text) returns table (is_announced boolean)
language sql
stable
rows 1
as $$
  select case
    when current_setting('transaction_isolation') <> 'read committed' then false
    else exists (
      select
      from (values (1)) one
      left join lateral (
        select t.next_xid, t.heard_xid
        from fairq.ticks t
        where t.shard_no = p_shard_no
          and t.queue = p_queue
        order by t.tick desc
        limit 1
      ) k on true
      cross join lateral (
        select
        from fairq.rings r
        where r.shard_no = p_shard_no
          and r.queue = p_queue
          and r.announced
          and r.xid >= coalesce(k.next_xid, '0')
          and r.xid <> coalesce(k.heard_xid, '0')
        limit 1
      ) r
    )
  end
$$;
comment on function fairq._announced(integer, text) is 'Whether a NOTIFY has been sent that no promotion has heeded yet.';

-- sql/functions/_await_domain.sql

-- Waits for the lock of a domain, and takes it, but not for longer than somebody who promotes would hold it: a transaction that promoted and stays open must
-- not keep every pop waiting.
-- Returns whether it got the lock.
-- Locks: the domain, until the transaction ends.
create function fairq._await_domain(p_shard_no integer, p_queue text) returns boolean
language plpgsql
volatile
set search_path = ''
set lock_timeout = '200ms'
as $$
begin
  perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  return true;
exception when lock_not_available or deadlock_detected then
  return false;
end;
$$;
comment on function fairq._await_domain(integer, text) is 'Waits for the lock of a domain for a moment.';

-- sql/functions/_backoff.sql

create function fairq._backoff(p_base interval, p_cap interval, p_attempt integer) returns interval
language sql
volatile
as $$
  -- In seconds: 2^30 times a base of days would overflow an interval. It is past every cap that matters, and more would overflow in the end, too.
  select least(extract(epoch from p_cap), extract(epoch from p_base) * power(2, least(p_attempt - 1, 30)))::double precision
    * (0.75 + random() / 2) * interval '1 second'
$$;
comment on function fairq._backoff(interval, interval, integer) is
  'Pause before the next attempt: doubled each time, capped, 25 percent of jitter both ways.';

-- sql/functions/_beat.sql

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

-- sql/functions/_block.sql

-- Waiting tasks whose concurrency key is taken: overflow -> blocked. By ctid and no other way, see _hold.
-- Locks: tasks, the rows named; the caller holds the domain.
create function fairq._block(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  if p_ctids <> '{}' then
    update fairq.tasks t
    set state = 'blocked'
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids);
  end if;
end;
$$;
comment on function fairq._block(integer, tid[]) is 'Takes tasks whose concurrency key is taken out of the line.';

-- sql/functions/_cancel_waiting.sql

-- Ends the waiting tasks among those somebody wished to cancel. Held ones are left: their wish stays, and their holder learns of
-- it with its heartbeat. A queued task that is being popped right now is locked and counts as held.
-- "offset 0": as joins, each of these look-ups could become a walk through all wishes there ever were.
-- Locks: tasks (overflow rows, which the caller's domain lock protects; queued rows with "skip locked"), cancellations.
create function fairq._cancel_waiting(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ids bigint[];
  v_ctids tid[];
begin
  select array_agg(w.id), array_agg(w.ctid) into v_ids, v_ctids
  from (
    select t.id, t.ctid
    from (select distinct i.id from unnest(p_ids) i(id)) i
    cross join lateral (
      select n.id, n.ctid
      from fairq.tasks n
      where n.shard_no = p_shard_no
        and n.id = i.id
        and n.worker_id is null
        -- retry_task withdraws the wish, not the ring.
        and exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = n.id offset 0)
      for update skip locked
      offset 0
    ) t
  ) w;
  -- One that is being popped is locked; should the pop roll back it would be waiting again.
  perform fairq._ring_wishes(p_shard_no, array(select i.id from unnest(p_ids) i(id) where i.id <> all(coalesce(v_ids, '{}'))));
  if v_ids is null then
    return 0;
  end if;

  perform fairq._remove(p_shard_no, 'cancellations', array(
    select w.ctid
    from unnest(v_ids) i(id)
    cross join lateral (
      select c.ctid
      from fairq.cancellations c
      where c.shard_no = p_shard_no
        and c.task_id = i.id
      offset 0
    ) w
  ));
  return fairq._end_tasks(p_shard_no, v_ctids, 'cancelled', null, p_now);
end;
$$;
comment on function fairq._cancel_waiting(integer, bigint[], timestamptz) is 'Ends the waiting ones of the tasks to be cancelled.';

-- sql/functions/_charge.sql

-- The gate after p_taken tasks went through it; less than nothing: so many came back, and are not charged. in_flight is the number of the group's tasks
-- that are counted, so it grows only where tasks are counted (see _counts): what a rate alone lets through nobody would report back.
create function fairq._charge(p_policy fairq.policy, p_gate fairq.gate, p_taken integer, p_now timestamptz) returns fairq.gate
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_taken = 0 then
    return p_gate;
  end if;
  if fairq._counts(p_policy) then
    p_gate.in_flight := coalesce(p_gate.in_flight, 0) + p_taken;
  end if;
  if p_policy.rate_seconds is not null then
    p_gate.rate_at := greatest(p_gate.rate_at, p_now) + p_taken * p_policy.rate_seconds * interval '1 second';
  end if;
  if p_gate.open_until is not null then
    p_gate.probe_until := case when p_taken > 0 then p_now + p_policy.breaker_cooldown end;
  end if;
  return p_gate;
end;
$$;
comment on function fairq._charge(fairq.policy, fairq.gate, integer, timestamptz) is 'The gate of a lane after tasks went through.';

-- sql/functions/_charge_meters.sql

-- Takes the places of tasks just popped. The caller holds #meters since it asked.
create function fairq._charge_meters(p_queue text, p_popped integer, p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  perform fairq._take_place(0, '#meters', 'queue ' || p_queue, p_now, p_popped);
  perform fairq._take_place(0, '#meters', 'cluster', p_now, p_popped);
end;
$$;
comment on function fairq._charge_meters(text, integer, timestamptz) is 'Charges tasks just popped to the meters.';

-- sql/functions/_check_group.sql

create function fairq._check_group(p_queue text, p_group_key text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  if p_group_key is null or p_group_key = '' or octet_length(p_group_key) > 500 then
    raise exception 'the group key is %', case when p_group_key is null then 'null' when p_group_key = '' then 'empty' else 'too long' end
      using errcode = 'QF001', hint = 'Name the tenant: a text of 1 to 500 bytes.';
  end if;
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;
end;
$$;
comment on function fairq._check_group(text, text) is 'Raises QF001 or QF003 when a group cannot be meant.';

-- sql/functions/_check_isolation.sql

-- Promotion and pop have to see what others committed a moment ago.
-- Raises QF005 in REPEATABLE READ and SERIALIZABLE.
create function fairq._check_isolation(p_queue text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'queue "%" is promoted and popped in READ COMMITTED, this transaction is %', p_queue, upper(current_setting('transaction_isolation'))
      using errcode = 'QF005',
        hint = 'Call it in a transaction of its own. Creating and cancelling tasks work in every isolation level.';
  end if;
end;
$$;
comment on function fairq._check_isolation(text) is 'Raises QF005 when the transaction is not READ COMMITTED.';

-- sql/functions/_check_lengths.sql

create function fairq._check_lengths(p_worker_id bigint, p_ids bigint[], p_attempts integer[]) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if coalesce(cardinality(p_ids), 0) <> coalesce(cardinality(p_attempts), 0) then
    raise exception 'worker % names % tasks and % attempts', p_worker_id, coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)
      using errcode = 'QF011', hint = 'Both arrays have one element per task.';
  end if;
end;
$$;
comment on function fairq._check_lengths(bigint, bigint[], integer[]) is 'Raises QF011 when ids and attempts do not pair.';

-- sql/functions/_check_limit.sql

create function fairq._check_limit(p_limit integer) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_limit is null or p_limit < 1 or p_limit > 100000 then
    raise exception 'the limit % is out of range', coalesce(p_limit::text, 'null')
      using errcode = 'QF007', hint = 'Ask for 1 to 100000 tasks.';
  end if;
end;
$$;
comment on function fairq._check_limit(integer) is 'Raises QF007 when a limit is not 1 to 100000.';

-- sql/functions/_check_policy.sql

-- What is wrong with settings of a queue, group or key, before anything is written.
-- Raises QF007 a number out of range, QF009 a time.
create function fairq._check_policy(
  p_of text,
  p_weight double precision,
  p_max_running integer,
  p_rate_limit integer,
  p_rate_period interval,
  p_rate_burst integer,
  p_breaker_threshold integer,
  p_breaker_cooldown interval
) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_weight is not null and (p_weight not between 0.001 and 1000 or p_weight = 'NaN') then
    raise exception 'the weight % of % is out of range', p_weight, p_of
      using errcode = 'QF007', hint = 'Relative to an ordinary group of weight 1: 0.001 to 1000.';
  end if;
  if p_max_running < 0 or p_rate_limit < 1 or p_rate_burst not between 1 and 100000 or p_breaker_threshold < 1 then
    raise exception 'a limit of % is out of range: max running %, rate limit %, rate burst %, breaker threshold %', p_of,
      coalesce(p_max_running::text, 'not given'), coalesce(p_rate_limit::text, 'not given'), coalesce(p_rate_burst::text, 'not given'),
      coalesce(p_breaker_threshold::text, 'not given')
      using errcode = 'QF007', hint = 'A cap is 0 or more, a burst 1 to 100000, the others 1 or more. To lift a limit, name it in p_reset.';
  end if;
  -- A full burst at the slowest rate has to be paid for before the end of time, or promotion of the whole queue fails.
  if p_rate_period <= interval '0' or not fairq._is_span(p_rate_period, '366 days') or p_breaker_cooldown <= interval '0'
    or not fairq._is_span(p_breaker_cooldown, '366 days')
  then
    raise exception 'a time of % is out of range: rate period %, breaker cooldown %', p_of, coalesce(p_rate_period::text, 'not given'),
      coalesce(p_breaker_cooldown::text, 'not given')
      using errcode = 'QF009', hint = 'More than nothing, at most 366 days; for example: interval ''1 minute''.';
  end if;
end;
$$;
comment on function fairq._check_policy(text, double precision, integer, integer, interval, integer, integer, interval) is
  'Raises an error of class QF for settings that make no sense.';

-- sql/functions/_check_reset.sql

-- What p_reset may name depends on what is configured: a name that means nothing there is refused, or a misspelt reset would look like one that worked.
-- Raises QF014 an unknown name to reset.
create function fairq._check_reset(p_of text, p_reset text[], p_known text[]) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if not p_reset <@ p_known then
    raise exception 'p_reset of % names something that cannot be reset there: %', p_of, p_reset
      using errcode = 'QF014', hint = format('There are: %s.', array_to_string(p_known, ', '));
  end if;
end;
$$;
comment on function fairq._check_reset(text, text[], text[]) is 'Raises QF014 for a name in p_reset that means nothing there.';

-- sql/functions/_check_task.sql

-- What is wrong with a task, said clearly, before anything is written.
-- Raises QF001 group key, QF002 payload, QF006 other keys, QF008 cost, QF009 times, QF007 attempts.
create function fairq._check_task(
  p_group_key text,
  p_payload jsonb,
  p_payload_limit integer,
  p_kind text,
  p_priority integer,
  p_run_at timestamptz,
  p_expires_at timestamptz,
  p_max_attempts integer,
  p_cost double precision,
  p_timeout interval,
  p_idempotency_key text,
  p_concurrency_key text
) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_group_key is null or p_group_key = '' or octet_length(p_group_key) > 500 then
    raise exception 'the group key is %', case when p_group_key is null then 'null' when p_group_key = '' then 'empty' else 'too long' end
      using errcode = 'QF001', hint = 'Name the tenant the task belongs to: a text of 1 to 500 bytes.';
  end if;
  if p_payload is null then
    raise exception 'the payload of a task of group "%" is null', p_group_key
      using errcode = 'QF002', hint = 'Pass ''{}'' or ''null''::jsonb for a task without data.';
  end if;
  -- The binary form is rarely smaller than half the text, so the text is only made for payloads that come near the limit.
  if pg_column_size(p_payload) > p_payload_limit / 4 and octet_length(p_payload::text) > p_payload_limit then
    raise exception 'the payload of a task of group "%" has % bytes, % are allowed', p_group_key, octet_length(p_payload::text), p_payload_limit
      using errcode = 'QF002', hint = 'Store the data elsewhere and pass a reference, or raise the limit: select fairq.configure_cluster(p_payload_limit => ...);';
  end if;
  if p_kind is null or p_kind = '' or octet_length(p_kind) > 200 then
    raise exception 'the kind of a task of group "%" is %', p_group_key, coalesce('"' || left(p_kind, 40) || '"', 'null')
      using errcode = 'QF006', hint = 'Name the handler: a text of 1 to 200 bytes.';
  end if;
  if p_idempotency_key = '' or octet_length(p_idempotency_key) > 500 or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500 then
    raise exception 'the idempotency or concurrency key of a task of group "%" is empty or too long', p_group_key
      using errcode = 'QF006', hint = 'Keys have 1 to 500 bytes; null means none.';
  end if;
  if p_priority is null or p_priority not between -1000000 and 1000000 then
    raise exception 'the priority % of a task of group "%" is out of range', coalesce(p_priority::text, 'null'), p_group_key
      using errcode = 'QF007', hint = 'Higher runs first; the range is -1000000 to 1000000, the default 0.';
  end if;
  if p_max_attempts is not null and p_max_attempts not between 1 and 1000000 then
    raise exception 'max_attempts % of a task of group "%" is out of range', p_max_attempts, p_group_key
      using errcode = 'QF007', hint = 'At least 1; null takes the queue''s default.';
  end if;
  if p_cost is null or not (p_cost >= 0.001 and p_cost <= 1000000) or p_cost = 'NaN' then
    raise exception 'the cost % of a task of group "%" is out of range', coalesce(p_cost::text, 'null'), p_group_key
      using errcode = 'QF008', hint = 'The cost is relative to an ordinary task of cost 1: 0.001 to 1000000.';
  end if;
  if not isfinite(p_run_at) or not isfinite(p_expires_at) then
    raise exception 'run_at or expires_at of a task of group "%" is infinite', p_group_key
      using errcode = 'QF009', hint = 'Leave it null instead.';
  end if;
  -- Workers keep a length of time in types that end somewhere: one task that none of them can read would stop them all.
  if p_timeout is not null and (p_timeout <= interval '0' or p_timeout > interval '1000000000 seconds') then
    raise exception 'the timeout % of a task of group "%" is out of range', p_timeout, p_group_key
      using errcode = 'QF009', hint = 'More than 0, at most 1000000000 seconds; null for no limit.';
  end if;
end;
$$;
comment on function fairq._check_task(text, jsonb, integer, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text) is
  'Raises an error of class QF for a task that cannot be created.';

-- sql/functions/_claim_idempotency_key.sql

-- Takes an idempotency key for a new task. Equal keys wait for each other here, and only here, until the first one's transaction ends.
-- Returns the id of the task that has the key already; null: the key is ours.
-- Raises QF010 when that task has another payload or kind; in REPEATABLE READ and above, the usual 40001 when the other task came after the snapshot.
-- Locks: idempotency_keys, one row.
create function fairq._claim_idempotency_key(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_idempotency_key text,
  p_kind text,
  p_payload jsonb,
  p_id bigint
) returns bigint
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_fingerprint text := md5(p_kind || ' ' || p_payload::text);
  v_known record;
begin
  loop
    insert into fairq.idempotency_keys as k (shard_no, queue, group_key, idempotency_key, task_id, fingerprint, created_at)
    values (p_shard_no, p_queue, p_group_key, p_idempotency_key, p_id, v_fingerprint, fairq._now())
    on conflict (shard_no, queue, group_key, idempotency_key) do nothing;
    if found then
      return null;
    end if;

    select k.task_id, k.fingerprint into v_known
    from fairq.idempotency_keys k
    where k.shard_no = p_shard_no
      and k.queue = p_queue
      and k.group_key = p_group_key
      and k.idempotency_key = p_idempotency_key;
    exit when found;
    -- Swept between the two statements: take it now.
  end loop;

  if v_known.fingerprint <> v_fingerprint then
    raise exception 'the idempotency key "%" of group "%" belongs to task %, which has another kind or payload', p_idempotency_key, p_group_key, v_known.task_id
      using errcode = 'QF010', hint = 'Use a new key for a new task, or send exactly what was sent first.';
  end if;
  return v_known.task_id;
end;
$$;
comment on function fairq._claim_idempotency_key(integer, text, text, text, text, jsonb, bigint) is 'Takes an idempotency key, or returns the task that has it.';

-- sql/functions/_configure_meter.sql

-- Limits of a whole queue ('queue NAME') or of the cluster, kept as a group of #meters. A first cap or breaker counts the tasks that are held already; those being
-- popped at this very moment escape it.
-- Locks: the domain #meters, waits for it; groups, one row; held tasks with "skip locked".
create function fairq._configure_meter(
  p_scope text,
  p_queue text,
  p_max_running integer,
  p_rate_limit integer,
  p_rate_period interval,
  p_rate_burst integer,
  p_breaker_threshold integer,
  p_breaker_cooldown interval,
  p_reset text[]
) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_meter fairq.groups;
  v_counts boolean;
  v_bit integer := case when p_scope = 'cluster' then 2 else 1 end;
  v_adopted integer;
begin
  perform fairq._promote(0, '#meters', 1, true);
  v_meter := fairq._set_limits(0, '#meters', p_scope, null, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold,
    p_breaker_cooldown, p_reset);
  v_counts := coalesce(v_meter.max_running, v_meter.breaker_threshold) is not null;

  with held as materialized (
    select t.ctid, t.shard_no
    from fairq._shards(null) s(shard_no)
    join fairq.tasks t on t.shard_no = s.shard_no
    where t.worker_id is not null
      and (p_queue is null or t.queue = p_queue)
      and (t.meters & v_bit <> 0) <> v_counts
    for update of t skip locked
  ),
  changed as (
    update fairq.tasks t
    set meters = case when v_counts then t.meters | v_bit else t.meters & ~v_bit end
    from held h
    where t.shard_no = h.shard_no
      and t.ctid = h.ctid
    returning t.id
  )
  select count(*)::integer into v_adopted from changed;
  if v_adopted > 0 then
    insert into fairq.rings (shard_no, queue, group_key, freed)
    values (0, '#meters', p_scope, case when v_counts then -v_adopted else v_adopted end);
  end if;
  perform fairq._promote(0, '#meters', 1, true);

  update fairq.queues q
  set metered = m.metered
  from (
    select u.queue, exists (
      select
      from fairq.groups g
      where g.shard_no = 0
        and g.queue = '#meters'
        and g.group_key in ('queue ' || u.queue, 'cluster')
        and coalesce(g.max_running, g.rate_limit, g.breaker_threshold) is not null
    ) as metered
    from fairq.queues u
    where not u.internal
  ) m
  where q.queue = m.queue
    and q.metered <> m.metered;
end;
$$;
comment on function fairq._configure_meter(text, text, integer, integer, interval, integer, integer, interval, text[]) is
  'Writes the limits of a whole queue or of the cluster.';

-- sql/functions/_correct.sql

-- Where a lane of a queue that shares time goes on after its attempts took p_correction seconds more than was charged for them, or less.
-- What was charged too much is given back as far as p_clock and the last address given out: tasks of a group keep their order. The rest is credit, for the
-- next correction; without it a group whose tasks differ in length would lose a little each time. Credit is worth sixteen tasks at most, and is lost when the group
-- has nothing waiting, or a group whose estimate was far too high would come with a flood.
create function fairq._correct(
  p_finish bigint,
  p_pace fairq.pace,
  p_correction double precision,
  p_ran fairq.estimate[],
  p_weight double precision,
  p_clock bigint,
  p_was_idle boolean
) returns table (finish bigint, pace fairq.pace)
language plpgsql
immutable
rows 1
set search_path = ''
as $$
declare
  v_due bigint := coalesce(p_finish, p_clock) - coalesce(p_pace.credit, 0)
    + sign(coalesce(p_correction, 0))::bigint * fairq._step(abs(coalesce(p_correction, 0)), p_weight);
  v_finish bigint;
  v_pace fairq.pace;
begin
  v_pace.last_block := coalesce(p_pace.last_block, p_finish - 1, -1);
  v_pace.estimates := fairq._learn(p_pace.estimates, p_ran);
  v_finish := greatest(v_due, v_pace.last_block + 1, p_clock);
  v_pace.credit := case
    when p_was_idle then 0
    else least(v_finish - v_due, fairq._step(16 * (select coalesce(max(e.seconds), 1) from unnest(v_pace.estimates) e), p_weight))
  end;
  return query select v_finish, v_pace;
end;
$$;
comment on function fairq._correct(bigint, fairq.pace, double precision, fairq.estimate[], double precision, bigint, boolean) is
  'Finish tag and pace of a lane after its attempts took more or less than was charged.';

-- sql/functions/_counts.sql

create function fairq._counts(p_policy fairq.policy) returns boolean
language sql
immutable
parallel safe
as $$ select coalesce((p_policy).max_running, (p_policy).breaker_threshold) is not null $$;
comment on function fairq._counts(fairq.policy) is 'Whether the tasks of a group hold places, and tell their lane how they end.';

-- sql/functions/_end_tasks.sql

-- Ends tasks that nobody finishes: cancelled, expired, lost with no attempts left. The caller has locked them, or holds what protects them.
-- Rings for the places that come free, and what they were charged but did not use; tells those who wait for one of these tasks.
-- One that waited for a concurrency key may have been the one whose turn it was: the key is rung, or those behind it would wait for a ring that never comes.
-- By ctid and no other way, see _hold.
-- Returns how many it ended.
-- Locks: tasks, the rows named.
create function fairq._end_tasks(p_shard_no integer, p_ctids tid[], p_outcome text, p_error jsonb, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_ids bigint[];
begin
  with ended as (
    delete from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    returning t.*
  ),
  history as (
    insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at,
      started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload, error)
    select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, p_outcome, e.worker_id, e.created_at, e.run_at, e.expires_at,
      e.started_at, p_now, e.cost, e.attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers, e.payload, p_error
    from ended e
  ),
  timed as (
    insert into fairq.rings (shard_no, queue, group_key, correction)
    select e.shard_no, e.queue, e.group_key, sum(fairq._ran(e.started_at, p_now) - e.charge)
    from ended e
    where e.block is not null
      and e.charge is not null
    group by e.shard_no, e.queue, e.group_key
  ),
  freed as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, count(*)
    from ended e
    cross join lateral fairq._scopes(e.shard_no, e.queue, e.group_key, e.counted, e.meters, e.concurrency_key) s
    where e.block is not null
    group by s.shard_no, s.queue, s.group_key
  ),
  passed_on as (
    insert into fairq.rings (shard_no, queue, group_key)
    select distinct e.shard_no, '#keys', e.concurrency_key
    from ended e
    where e.block is null
      and e.state in ('overflow', 'blocked')
      and e.concurrency_key is not null
  )
  select array_agg(e.id) into v_ids from ended e;
  if v_ids is null then
    return 0;
  end if;
  perform fairq._tell_watchers(p_shard_no, v_ids, p_now);
  return cardinality(v_ids);
end;
$$;
comment on function fairq._end_tasks(integer, tid[], text, jsonb, timestamptz) is 'Ends tasks that no worker finishes.';

-- sql/functions/_expected.sql

create function fairq._expected(p_pace fairq.pace, p_kind text, p_cost double precision) returns double precision
language sql
immutable
parallel safe
as $$ select coalesce((select e.seconds from unnest(p_pace.estimates) e where e.kind = p_kind), p_cost) $$;
comment on function fairq._expected(fairq.pace, text, double precision) is
  'Seconds that a task is expected to take: the estimate of its group and kind; the cost it was created with while there is none.';

-- sql/functions/_expire_waiting.sql

-- Ends waiting tasks of a shard whose deadline passed, at most p_limit. Promotion and pop would refuse them too, when their turn comes; this
-- tells their owners in time.
-- Each deadline is looked at once: the sweep starts where the last one ended, not at the dead entries of tasks long finished. A task
-- whose transaction committed after its own deadline is missed here and meets promotion.
-- Locks: the domains of the tasks it ends, without waiting (a busy one is left for the next sweep); queued rows with "skip locked".
-- enable_sort is off: the rows come in the order of the index, another one with a sort behind it would read all of them.
-- Cost: tasks_expiry_idx from the floor to now.
create function fairq._expire_waiting(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
set enable_sort = off
as $$
declare
  v_floor timestamptz := to_timestamp(fairq._sweep_floor(p_shard_no, 'expiry') / 1000000.0);
  v_until timestamptz;
  v_queue text;
  v_ended integer := 0;
  v_complete boolean := true;
begin
  select coalesce(max(e.expires_at) filter (where e.nth > p_limit), p_now) into v_until
  from (
    select t.expires_at, row_number() over (order by t.expires_at) as nth
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state in ('scheduled', 'overflow', 'blocked', 'queued')
      and t.expires_at >= coalesce(v_floor, '-infinity')
      and t.expires_at <= p_now
    order by t.expires_at
    limit p_limit + 1
  ) e;

  for v_queue in
    select distinct t.queue
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state in ('scheduled', 'overflow', 'blocked', 'queued')
      and t.expires_at >= coalesce(v_floor, '-infinity')
      and t.expires_at <= v_until
    order by t.queue
  loop
    if fairq._lock_domain(p_shard_no, v_queue, false) then
      v_ended := v_ended + fairq._end_tasks(p_shard_no, array(
        select t.ctid
        from fairq.tasks t
        where t.shard_no = p_shard_no
          and t.queue = v_queue
          and t.state in ('scheduled', 'overflow', 'blocked', 'queued')
          and t.expires_at >= coalesce(v_floor, '-infinity')
          and t.expires_at <= v_until
        order by t.expires_at
        limit p_limit - v_ended
        for update skip locked
      ), 'expired', null, p_now);
    else
      v_complete := false;
    end if;
  end loop;

  -- Many deadlines may be equal: when the limit was reached there may be more at v_until.
  if v_complete and v_ended < p_limit then
    perform fairq._set_sweep_floor(p_shard_no, 'expiry', (extract(epoch from v_until) * 1000000)::bigint);
  end if;
  return v_ended;
end;
$$;
comment on function fairq._expire_waiting(integer, integer, timestamptz) is 'Ends waiting tasks whose deadline passed.';

-- sql/functions/_finish.sql

-- finish_tasks in one shard. A task leaves with one delete, whose conditions are the fencing token; history, attempts and rings come from what it returned.
-- Who finishes a task that recovery takes at the same moment waits for that row, then finds another worker in it, and gets nothing.
-- The tasks are looked up by id, one by one, then _leave takes them by ctid and looks at the fencing token again. A row that moved in between,
-- because configure_group or configure_queue began to count it, is still this worker's: it is looked up once more.
create function fairq._finish(
  p_shard_no integer,
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_outcomes text[],
  p_results jsonb[],
  p_errors jsonb[],
  p_retry_delays interval[]
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_held record;
  v_left integer;
begin
  -- Nearly always nobody waits, and this look into an index is all.
  if exists (select from fairq.watches w where w.shard_no = p_shard_no and w.until > v_now) then
    perform fairq._tell_watchers(p_shard_no, p_ids, v_now);
  end if;
  loop
    select array_agg(h.ctid) as ctids, array_agg(i.attempt) as attempts, array_agg(h.outcome) as outcomes, array_agg(i.result) as results,
      array_agg(i.error) as errors, array_agg(h.run_at) as run_ats, array_agg(h.counted) as counted, array_agg(h.meters) as meters, array_agg(h.started_at) as started_ats
    into v_held
    from unnest(p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays) as i(id, attempt, outcome, result, error, retry_delay)
    cross join lateral (
      -- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
      select t.ctid, t.counted, t.meters, t.started_at,
        -- No attempt is left, or the next one would come after the deadline.
        case when i.outcome = 'retry' and (t.attempt >= t.max_attempts or r.run_at >= t.expires_at) then 'failed' else coalesce(i.outcome, 'succeeded') end
          as outcome,
        r.run_at
      from fairq.tasks t
      cross join lateral (
        select case
          when i.outcome = 'retry' then v_now + coalesce(i.retry_delay, (
            select fairq._backoff(q.retry_base, q.retry_cap, t.attempt) from fairq.queues q where q.queue = t.queue
          ))
        end as run_at
        offset 0
      ) r
      where t.shard_no = p_shard_no
        and t.id = i.id
        and t.attempt = i.attempt
        and t.worker_id is not distinct from p_worker_id
        and t.started_at is not null
      offset 0
    ) h;

    exit when v_held.ctids is null;
    return query
      select l.* from fairq._leave(p_shard_no, p_worker_id, v_held.ctids, v_held.attempts, v_held.outcomes, v_held.results, v_held.errors,
        v_held.run_ats, v_held.counted, v_held.meters, v_held.started_ats, v_now) l;
    get diagnostics v_left = row_count;
    if 'retry' = any(v_held.outcomes) then
      perform fairq._ring_wishes(p_shard_no, p_ids);
    end if;
    exit when v_left = cardinality(v_held.ctids);
  end loop;
end;
$$;
comment on function fairq._finish(integer, bigint, bigint[], integer[], text[], jsonb[], jsonb[], interval[]) is 'Ends attempts in one shard.';

-- sql/functions/_give_up_claims.sql

-- Claims whose lease ran out go back in line, at most p_limit; no attempt is burned, for none began. The sweep starts where the last one ended, not at
-- the dead entries of all claims ever made; it does not pass one that is locked, being started or finished right now.
-- Returns how many it gave up.
-- Locks: tasks, "skip locked".
-- Cost: tasks_claim_lease_idx from the floor to now.
create function fairq._give_up_claims(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
set enable_sort = off
as $$
declare
  v_floor timestamptz := coalesce(to_timestamp(fairq._sweep_floor(p_shard_no, 'claims') / 1000000.0), '-infinity');
  v_given_up integer;
begin
  v_given_up := fairq._return_tasks(p_shard_no, array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state = 'claimed'
      and t.lease_expires_at >= v_floor
      and t.lease_expires_at <= p_now
    order by t.lease_expires_at
    limit p_limit
    for update skip locked
  ), false);

  if not exists (
    select
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state = 'claimed'
      and t.lease_expires_at >= v_floor
      and t.lease_expires_at <= p_now
  ) then
    -- A claim that another transaction is making now may already be over when it commits; a minute is left for that.
    perform fairq._set_sweep_floor(p_shard_no, 'claims', (extract(epoch from p_now - interval '1 minute') * 1000000)::bigint);
  end if;
  return v_given_up;
end;
$$;
comment on function fairq._give_up_claims(integer, integer, timestamptz) is 'Puts claims whose lease ran out back in line.';

-- sql/functions/_groups_of_queued.sql

-- The groups of those tasks that are queued. The state is looked at after the task was found by its id: within the look-up the planner takes the ready
-- index for the shorter way, and reads all of it, dead entries included, for every id.
create function fairq._groups_of_queued(p_shard_no integer, p_ids bigint[]) returns text[]
language plpgsql
stable
set search_path = ''
as $$
begin
  return array(
    select distinct t.group_key
    from unnest(p_ids) i(id)
    cross join lateral (
      select k.group_key, k.state
      from fairq.tasks k
      where k.shard_no = p_shard_no
        and k.id = i.id
      offset 0
    ) t
    where t.state = 'queued'
  );
end;
$$;
comment on function fairq._groups_of_queued(integer, bigint[]) is 'The groups of those tasks that are queued.';

-- sql/functions/_has_news.sql

-- Whether a promotion would find something: a ring it has not heard, its own or a concurrency key's, or a scheduled task that is due. Takes no lock, writes nothing.
-- A pending transaction is looked up only once it has ended, so one that holds a million rings and stays open costs nothing.
-- The transaction that promoted last is a case of its own: what it rang before that may be a million rings, and is stepped over.
-- "offset 0" keeps the planner from joining the pending transactions with all rings there are.
-- Cost: a few entries of rings_xid_idx, one more per pending transaction that ended.
create function fairq._has_news(p_tick fairq.ticks) returns boolean
language plpgsql
volatile
set search_path = ''
as $$
begin
  return coalesce(p_tick.next_due_at <= fairq._now(), false)
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid >= p_tick.next_xid
        and r.xid < p_tick.heard_xid
    )
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid >= p_tick.next_xid
        and r.xid > p_tick.heard_xid
    )
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid = p_tick.heard_xid
        and r.ring_id > p_tick.heard_ring
    )
    or exists (
      select
      from unnest(p_tick.pending) p(xid)
      where p.xid <> p_tick.heard_xid
        and pg_visible_in_snapshot(p.xid, pg_current_snapshot())
        and exists (
          select
          from fairq.rings r
          where r.shard_no = p_tick.shard_no
            and r.queue = p_tick.queue
            and r.xid = p.xid
          offset 0
        )
    )
    -- A concurrency key that was freed may let tasks of this queue go on.
    or (p_tick.keyed and exists (
      select from fairq._tick(p_tick.shard_no, '#keys') k where fairq._has_news(k)
    ));
end;
$$;
comment on function fairq._has_news(fairq.ticks) is 'Whether there are rings not heard yet, or scheduled tasks due.';

-- sql/functions/_hear_rings.sql

-- Takes the rings that committed since the last tick and returns what they say: the lanes they touch, as they are now.
--
-- Exactly once, without deleting or marking a ring: a ring is new when its transaction is at or past the last tick's next_xid, or
-- was pending then, and the row is visible now. What is visible and what is stored for the next tick come from the snapshot of one
-- statement: two snapshots would hear a ring twice or never, and a ring that tells of freed places may not be heard twice.
--
-- The own transaction is a case of its own: no snapshot lists it as pending, and its id may lie above or below the snapshot's xmax. Its
-- rings are heard up to here (a task may be created, promoted and popped in one transaction), the tick says up to which ring,
-- and it is stored as pending: what it rings later is heard by the next tick, its own or another's.
--
-- When more rings wait than p_limit, the pass stops at a transaction id: later ones are left for the next pass.
-- Locks: lanes, rows it replaces; the caller holds the domain.
-- Cost: new rings, one lane each; rings_xid_idx and lanes_pkey.
create function fairq._hear_rings(
  p_tick fairq.ticks,
  p_queue fairq.queues,
  p_limit integer,
  p_now timestamptz,
  out o_next_xid xid8,
  out o_pending xid8[],
  out o_heard_ring bigint,
  out o_next_due_at timestamptz,
  out o_cancelled bigint[],
  out o_lane_count bigint,
  out o_newcomer_position bigint,
  out o_lanes fairq.lanes[]
)
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_own xid8 := pg_current_xact_id();
  v_snapshot pg_snapshot;
  v_last xid8;
  v_replaced tid[];
  -- Whether every group of the queue has limits; otherwise only those with settings of their own may have any.
  v_limited boolean := coalesce(p_queue.group_max_running, p_queue.group_rate_limit, p_queue.group_breaker_threshold) is not null;
begin
  -- Behind the transaction that promoted last: only the last tick knows which of its rings were heard.
  select r.xid into v_last
  from fairq.rings r
  where r.shard_no = p_tick.shard_no
    and r.queue = p_tick.queue
    and r.xid >= p_tick.next_xid
    and r.xid > p_tick.heard_xid
  order by r.xid
  offset p_limit
  limit 1;

  with ring as materialized (
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid >= p_tick.next_xid
      and r.xid < p_tick.heard_xid
    union all
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid >= p_tick.next_xid
      and r.xid > p_tick.heard_xid
      and r.xid <= coalesce(v_last, '18446744073709551615')
    union all
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid = p_tick.heard_xid
      and r.ring_id > p_tick.heard_ring
    union all
    select r.xid, r.ring_id, r.group_key, r.priority, r.sequence, r.freed, r.failures, r.succeeded, r.keyed, r.due_at, r.cancelled_id, r.correction, r.ran
    from unnest(p_tick.pending) p(xid)
    cross join lateral (
      -- One look-up per transaction: the planner takes "= any" for a filter, and reads all rings there are. "offset 0" keeps it from joining.
      select w.xid, w.ring_id, w.group_key, w.priority, w.sequence, w.freed, w.failures, w.succeeded, w.keyed, w.due_at, w.cancelled_id, w.correction, w.ran
      from fairq.rings w
      where w.shard_no = p_tick.shard_no
        and w.queue = p_tick.queue
        and w.xid = p.xid
      offset 0
    ) r
    where p.xid <> p_tick.heard_xid
  ),
  news as materialized (
    select r.group_key, sum(r.freed)::integer as freed, min(r.sequence) as first_sequence, bool_or(r.keyed) as keyed,
      bool_or(r.succeeded) as succeeded, coalesce(sum(r.failures) filter (where r.ring_id >= r.last_success), 0)::integer as failures,
      array_agg((r.priority, r.sequence)::fairq.cursor) filter (where r.sequence is not null) as heard,
      sum(r.correction) as correction, array_agg(r.ran) filter (where (r.ran).kind is not null) as ran
    from (
      select g.*, coalesce(max(g.ring_id) filter (where g.succeeded) over (partition by g.group_key), 0) as last_success
      from ring g
      where g.due_at is null
    ) r
    group by r.group_key
  ),
  lane as materialized (
    select n.group_key, n.first_sequence, n.heard, n.keyed or coalesce(l.keyed, false) as keyed,
      l.ctid as replaces, l.version, l.lane_no, l.position, l.last_priority,
      coalesce(c.finish, l.finish) as finish,
      c.pace as pace,
      n.correction is not null as is_corrected,
      l.cursors is null or l.cursors = '{}' as was_idle,
      -- Per priority the smaller sequence, highest priority first.
      case
        when n.heard is null then coalesce(l.cursors, '{}')
        when cardinality(n.heard) = 1 and coalesce(l.cursors, '{}') = '{}' then n.heard
        else array(
          select (u.priority, min(u.sequence))::fairq.cursor
          from unnest(l.cursors || n.heard) u
          group by u.priority
          order by u.priority desc
        )
      end as cursors,
      coalesce((g.settings).weight, p_queue.weight) as weight,
      g.policy,
      case
        when g.policy is distinct from null or l.gate is distinct from null
          then fairq._settle(g.policy, l.gate, n.freed, n.failures, n.succeeded, p_now)
      end as gate
    from news n
    left join lateral (
      select v.ctid, v.version, v.lane_no, v.finish, v.position, v.keyed, v.gate, v.pace, v.last_priority, v.cursors
      from fairq.lanes v
      where v.shard_no = p_tick.shard_no
        and v.queue = p_tick.queue
        and v.group_key = n.group_key
      order by v.version desc
      limit 1
    ) l on true
    cross join lateral (
      select s as settings, case when s.queue is not null or v_limited then fairq._policy(p_queue, s) end as policy
      from (values (1)) one
      left join lateral (
        select c.*
        from fairq.groups c
        where c.shard_no = p_tick.shard_no
          and c.queue = p_tick.queue
          and c.group_key = n.group_key
        offset 0
      ) s on true
      offset 0
    ) g
    left join lateral (
      select x.finish, x.pace
      -- "offset 0" makes this a gate before the call, not a filter behind it: queues that count pay nothing.
      from (select where p_queue.fairness = 'time' offset 0) gate
      cross join lateral fairq._correct(l.finish, l.pace, n.correction, n.ran, coalesce((g.settings).weight, p_queue.weight), p_tick.clock,
        coalesce(l.cursors, '{}') = '{}' and n.first_sequence is null) x
    ) c on true
  ),
  numbered as (
    select l.group_key, l.replaces, l.heard, l.first_sequence, l.cursors, l.weight, l.keyed, l.policy, l.gate, l.pace, l.is_corrected,
      case when l.policy is distinct from null then fairq._allowance(l.policy, l.gate, p_now) end as allowance,
      coalesce(l.version, 0) as version,
      coalesce(l.lane_no, p_tick.lane_count + row_number() over (partition by l.lane_no is null order by l.first_sequence)) as lane_no,
      coalesce(l.finish, 0) as finish,
      coalesce(l.last_priority, 0) as last_priority,
      l.position,
      l.was_idle,
      -- A group that was idle, and has used up its last turn, comes at once: before the lane that is next, behind the newcomers before it.
      case
        when l.was_idle and coalesce(l.finish, 0) <= p_tick.clock and l.first_sequence is not null
          then least(
            p_tick.newcomer_position + row_number() over (
              partition by l.was_idle and coalesce(l.finish, 0) <= p_tick.clock and l.first_sequence is not null
              -- Groups that wait for the same concurrency key are idle until it is free: they take turns.
              order by case when l.keyed then coalesce(l.finish, 0) else 0 end, l.first_sequence),
            fairq._gap_end(p_tick.clock_position))
      end as newcomer_position
    from lane l
  ),
  told as (
    -- Nobody starts before the clock. A group that waits keeps its place, whatever it adds.
    select n.replaces, n.lane_no, n.newcomer_position,
      (p_tick.shard_no, n.last_priority, n.lane_no, n.version, greatest(n.finish, p_tick.clock),
       case
         when n.newcomer_position is not null then n.newcomer_position
         when (n.finish, n.position) >= (p_tick.clock, p_tick.clock_position) and not n.was_idle and not n.is_corrected then n.position
         when n.finish > p_tick.clock then fairq._lane_position(n.lane_no)
         else greatest(fairq._lane_position(n.lane_no), p_tick.clock_position)
       end,
       n.weight,
       case when n.cursors <> '{}' then (n.allowance).look_at end,
       n.cursors <> '{}' and (n.policy is null or (n.allowance).tasks > 0),
       n.keyed, p_tick.queue, n.group_key, n.cursors, n.policy, n.gate, n.pace)::fairq.lanes as lane
    from numbered n
  )
  select pg_current_snapshot(),
    (select max(r.ring_id) from ring r where r.xid = v_own),
    (select least(p_tick.next_due_at, min(r.due_at)) from ring r),
    (select array_agg(r.cancelled_id) from ring r where r.cancelled_id is not null),
    greatest(p_tick.lane_count, max(t.lane_no)),
    greatest(p_tick.newcomer_position, max(t.newcomer_position)),
    coalesce(array_agg(t.lane), '{}'),
    array_agg(t.replaces) filter (where t.replaces is not null)
  into v_snapshot, o_heard_ring, o_next_due_at, o_cancelled, o_lane_count, o_newcomer_position, o_lanes, v_replaced
  from told t;

  -- Never past the snapshot's xmax: the own transaction may lie beyond it, and between the two others that nobody lists as pending.
  o_next_xid := least((v_last::text::bigint + 1)::text::xid8, pg_snapshot_xmax(v_snapshot));
  o_pending := array(
    select p.xid
    from (select pg_snapshot_xip(v_snapshot) union select v_own) p(xid)
    where p.xid < o_next_xid
  );
  o_heard_ring := coalesce(o_heard_ring, case when p_tick.heard_xid = v_own then p_tick.heard_ring end, 0);
  o_lane_count := coalesce(o_lane_count, p_tick.lane_count);
  o_newcomer_position := coalesce(o_newcomer_position, p_tick.newcomer_position);

  -- From here on these lanes live in o_lanes only, until admission writes their next versions.
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;
comment on function fairq._hear_rings(fairq.ticks, fairq.queues, integer, timestamptz) is
  'Consumes the rings that committed since the last tick, exactly once.';

-- sql/functions/_held_by.sql

-- The tasks among p_ids that the worker holds in the attempts named, locked: their ids and where they are. The fencing of release and start.
create function fairq._held_by(
  p_shard_no integer,
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_state text,
  out o_ids bigint[],
  out o_ctids tid[]
)
language plpgsql
volatile
set search_path = ''
as $$
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  -- Nobody holds a task that waits: no worker is not a worker.
  if p_worker_id is null then
    return;
  end if;
  -- Each is looked up by its id, in the order of the ids: two calls with the same tasks wait for each other and do not deadlock.
  select array_agg(h.id), array_agg(h.ctid)
  into o_ids, o_ctids
  from (select u.id, u.attempt from unnest(p_ids, p_attempts) as u(id, attempt) order by u.id) i
  cross join lateral (
    select t.id, t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.id = i.id
      and t.attempt = i.attempt
      and t.worker_id is not distinct from p_worker_id
      and (p_state is null or t.state is not distinct from p_state)
    for update
    offset 0
  ) h;
end;
$$;
comment on function fairq._held_by(integer, bigint, bigint[], integer[], text) is 'Locks and returns the tasks that a worker still holds.';

-- sql/functions/_hold.sql

-- Gives queued tasks to a worker. The caller has locked them.
-- By ctid and no other way: every other scan is switched off, here and in the functions below that take ctids. Where statistics are missing or old,
-- the planner finds a walk through all tasks of the shard cheaper than a hundred fetches by ctid, and it keeps such a plan for the whole session.
-- Returns the tasks in served order.
create function fairq._hold(p_shard_no integer, p_ctids tid[], p_worker_id bigint, p_claim_lease interval, p_now timestamptz, p_meters integer)
returns setof fairq.tasks
language plpgsql
volatile
rows 100
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  return query
    with held as (
      update fairq.tasks t
      set state = case when p_claim_lease is null then 'running' else 'claimed' end,
        worker_id = p_worker_id,
        attempt = t.attempt + 1,
        started_at = case when p_claim_lease is null then p_now end,
        lease_expires_at = p_now + p_claim_lease,
        meters = p_meters
      where t.shard_no = p_shard_no
        and t.ctid = any(p_ctids)
      returning t.*
    )
    select h.* from held h order by h.block, h.position;
end;
$$;
comment on function fairq._hold(integer, tid[], bigint, interval, timestamptz, integer) is 'Gives queued tasks to a worker.';

-- sql/functions/_lane.sql

-- The lane of a group as it is: the newest version, one step in lanes_pkey. All null when there is none.
create function fairq._lane(p_shard_no integer, p_queue text, p_group_key text) returns fairq.lanes
language plpgsql
stable
set search_path = ''
as $$
declare
  v_lane fairq.lanes;
begin
  select l.* into v_lane
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue
    and l.group_key = p_group_key
  order by l.version desc
  limit 1;
  return v_lane;
end;
$$;
comment on function fairq._lane(integer, text, text) is 'The lane of a group, newest version.';

-- sql/functions/_last_block.sql

create function fairq._last_block(p_pace fairq.pace, p_block bigint) returns fairq.pace
language sql
immutable
parallel safe
as $$ select case when p_pace is distinct from null then (coalesce(p_block, p_pace.last_block), p_pace.credit, p_pace.estimates)::fairq.pace end $$;
comment on function fairq._last_block(fairq.pace, bigint) is 'The pace of a lane whose last address is in this block; null: where it was.';

-- sql/functions/_learn.sql

-- The estimates of a lane, kept up: per kind the mean of the first 16 attempts, then a moving one. One attempt counts as four times the estimate at most, and as a quarter
-- at least: a hang among quick tasks would make the next ones dear. What it really took is charged all the same, by the correction.
-- The 32 kinds seen last are kept.
create function fairq._learn(p_known fairq.estimate[], p_ran fairq.estimate[]) returns fairq.estimate[]
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_ran fairq.estimate;
  v_known fairq.estimate;
  v_estimates fairq.estimate[] := coalesce(p_known, '{}');
begin
  for v_ran in
    select r.kind, sum(r.tasks)::integer, sum(r.seconds) / sum(r.tasks)
    from unnest(p_ran) r
    group by r.kind
    order by r.kind
  loop
    select e.* into v_known from unnest(v_estimates) e where e.kind = v_ran.kind;
    if found then
      v_ran.seconds := greatest(v_known.seconds / 4, least(v_known.seconds * 4, v_ran.seconds));
      v_ran.seconds := v_known.seconds + (v_ran.seconds - v_known.seconds) * least(1, v_ran.tasks::double precision / least(16, v_known.tasks + v_ran.tasks));
      v_ran.tasks := v_known.tasks + v_ran.tasks;
    end if;
    v_ran.tasks := least(16, v_ran.tasks);
    v_ran.seconds := greatest(0.0001, v_ran.seconds);
    v_estimates := (v_ran || array(
      select (e.kind, e.tasks, e.seconds)::fairq.estimate
      from unnest(v_estimates) with ordinality as e(kind, tasks, seconds, nth)
      where e.kind <> v_ran.kind
      order by e.nth
    ))[1:32];
  end loop;
  return v_estimates;
end;
$$;
comment on function fairq._learn(fairq.estimate[], fairq.estimate[]) is 'The estimates of a lane after attempts were measured.';

-- sql/functions/_leave.sql

-- Ends attempts that _finish looked up: one delete or update, whose conditions are the fencing token, because recovery may have taken a task since.
-- Who has to wait for recovery finds another worker in the row, and gets nothing. Who has to wait for settings that began to count the task, too:
-- _finish then looks again. By ctid and no other way, see _hold.
create function fairq._leave(
  p_shard_no integer,
  p_worker_id bigint,
  p_ctids tid[],
  p_attempts integer[],
  p_outcomes text[],
  p_results jsonb[],
  p_errors jsonb[],
  p_run_ats timestamptz[],
  p_counted boolean[],
  p_meters integer[],
  p_started_ats timestamptz[],
  p_now timestamptz
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  return query
    with input as materialized (
      select i.ctid, i.attempt, i.outcome, i.result, i.error, i.run_at, i.counted, i.meters, i.started_at, i.nth
      from unnest(p_ctids, p_attempts, p_outcomes, p_results, p_errors, p_run_ats, p_counted, p_meters, p_started_ats)
        with ordinality as i(ctid, attempt, outcome, result, error, run_at, counted, meters, started_at, nth)
    ),
    ended as (
      delete from fairq.tasks t
      using input i
      where t.shard_no = p_shard_no
        and t.ctid = i.ctid
        and t.attempt = i.attempt
        and t.worker_id = p_worker_id
        and (t.counted, t.meters) = (i.counted, i.meters)
        and i.outcome <> 'retry'
      returning t.*, i.outcome, i.result, i.error, i.nth
    ),
    history as (
      insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at,
        expires_at, started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload,
        result, error)
      select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, e.outcome, e.worker_id, e.created_at, e.run_at,
        e.expires_at, e.started_at, p_now, e.cost, e.attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers,
        e.payload, e.result, e.error
      from ended e
    ),
    retried as (
      update fairq.tasks t
      set state = 'scheduled',
        run_at = i.run_at,
        block = null, position = null, worker_id = null, started_at = null, lease_expires_at = null, counted = false, meters = 0
      from input i
      where i.outcome = 'retry'
        and t.shard_no = p_shard_no
        and t.ctid = i.ctid
        and t.attempt = i.attempt
        and t.worker_id = p_worker_id
        and (t.counted, t.meters) = (i.counted, i.meters)
      returning t.id, t.queue, t.group_key, t.concurrency_key, t.attempt, t.run_at, t.kind, t.charge, i.error, i.counted, i.meters, i.started_at, i.nth
    ),
    attempted as (
      insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, outcome, error)
      select p_shard_no, r.id, r.attempt, p_worker_id, r.started_at, p_now, 'retry', r.error
      from retried r
    ),
    announced as (
      insert into fairq.rings (shard_no, queue, group_key, due_at)
      select p_shard_no, r.queue, min(r.group_key), min(r.run_at)
      from retried r
      group by r.queue
    ),
    timed as (
      -- Where groups share time: what the attempts took beyond what was charged for them.
      insert into fairq.rings (shard_no, queue, group_key, correction, ran)
      select p_shard_no, a.queue, a.group_key, sum(x.seconds - a.charge), (a.kind, count(*), sum(x.seconds))::fairq.estimate
      from (
        select e.queue, e.group_key, e.kind, e.charge, e.started_at from ended e where e.charge is not null
        union all
        select r.queue, r.group_key, r.kind, r.charge, r.started_at from retried r where r.charge is not null
      ) a
      cross join lateral (select fairq._ran(a.started_at, p_now) as seconds) x
      group by a.queue, a.group_key, a.kind
    ),
    limited as (
      select e.queue, e.group_key, e.counted, e.meters, e.concurrency_key, e.outcome, e.nth
      from ended e
      where e.counted or e.meters <> 0 or e.concurrency_key is not null
      union all
      select r.queue, r.group_key, r.counted, r.meters, r.concurrency_key, 'retry', r.nth
      from retried r
      where r.counted or r.meters <> 0 or r.concurrency_key is not null
    ),
    freed as (
      -- Places, and for breakers how the attempts ended: failures after the last success.
      insert into fairq.rings (shard_no, queue, group_key, freed, failures, succeeded)
      select f.shard_no, f.queue, f.group_key, count(*), count(*) filter (where f.outcome in ('failed', 'retry') and f.nth > f.last_success),
        bool_or(f.outcome = 'succeeded')
      from (
        select s.shard_no, s.queue, s.group_key, l.outcome, l.nth,
          coalesce(max(l.nth) filter (where l.outcome = 'succeeded') over (partition by s.shard_no, s.queue, s.group_key), 0) as last_success
        from limited l
        cross join lateral fairq._scopes(p_shard_no, l.queue, l.group_key, l.counted, l.meters, l.concurrency_key) s
      ) f
      group by f.shard_no, f.queue, f.group_key
    )
    select e.id from ended e
    union all
    select r.id from retried r;
end;
$$;
comment on function fairq._leave(integer, bigint, tid[], integer[], text[], jsonb[], jsonb[], timestamptz[], boolean[], integer[], timestamptz[], timestamptz) is 'Ends attempts that were looked up.';

-- sql/functions/_line_up.sql

-- Blocked tasks go back in line at their old place: blocked -> overflow, and ring. By ctid and no other way, see _hold.
create function fairq._line_up(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  with back as (
    update fairq.tasks t
    set state = 'overflow'
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
      and t.state = 'blocked'
    returning t.queue, t.group_key, t.priority, t.sequence
  )
  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  select p_shard_no, b.queue, b.group_key, b.priority, min(b.sequence), true
  from back b
  group by b.queue, b.group_key, b.priority;
end;
$$;
comment on function fairq._line_up(integer, tid[]) is 'Puts blocked tasks back in line.';

-- sql/functions/_lock_domain.sql

-- Takes the lock that makes promotion one at a time, until the end of the transaction.
-- Returns false when another session holds it and p_wait is false.
-- The snapshot of the caller's next statement is taken after the lock, so it sees all that the previous promotion wrote:
-- this is why promotion insists on READ COMMITTED.
-- Raises QF005 in another isolation level, QF003 when the queue is unknown.
-- Locks: domains, one row.
create function fairq._lock_domain(p_shard_no integer, p_queue text, p_wait boolean) returns boolean
language plpgsql
volatile
set search_path = ''
as $$
begin
  perform fairq._check_isolation(p_queue);
  if p_wait then
    perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  else
    perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update skip locked;
  end if;
  if found then
    return true;
  end if;

  if not exists (select from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue) then
    perform fairq._refuse_queue(p_queue);
  end if;
  return false;
end;
$$;
comment on function fairq._lock_domain(integer, text, boolean) is 'Takes the lock of a domain; false when it is taken.';

-- sql/functions/_meter.sql

-- Caps, rates and breakers of a whole queue and of the cluster, asked at pop: how many tasks may be popped now. Takes the lock of #meters, so pops of such
-- queues go one after the other; other queues never come here.
-- Hears first what left since, so what it says is exact.
-- Returns at most p_limit.
-- Raises QF015: claim leases and a cluster cap exclude each other.
-- Locks: the domain #meters, waits for it; until the transaction ends.
create function fairq._meter(p_queue text, p_limit integer, p_now timestamptz, p_claim_lease interval) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lane fairq.lanes;
  v_scope text;
  v_tick fairq.ticks;
begin
  perform fairq._lock_domain(0, '#meters', true);
  select k.* into v_tick from fairq._tick(0, '#meters') k;
  if v_tick.tick is null or fairq._has_news(v_tick) then
    perform fairq._promote(0, '#meters', 1, true);
  end if;
  foreach v_scope in array array['queue ' || p_queue, 'cluster'] loop
    v_lane := fairq._lane(0, '#meters', v_scope);
    if v_scope = 'cluster' and p_claim_lease is not null and (v_lane.policy).max_running is not null then
      raise exception 'queue "%" is popped with claim leases, but the cluster has a cap of %', p_queue, (v_lane.policy).max_running
        using errcode = 'QF015', hint = 'Prefetched tasks would hold places of the cluster without running. Pop without a claim lease, or lift the cap.';
    end if;
    if v_lane.policy is distinct from null then
      p_limit := least(p_limit, (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks);
    end if;
  end loop;
  return p_limit;
end;
$$;
comment on function fairq._meter(text, integer, timestamptz, interval) is 'How many tasks the meters of a queue and of the cluster let pass now.';

-- sql/functions/_meter_limits.sql

-- The limits of a whole queue ('queue NAME') or of the cluster as they are now; all null when there are none. Volatile, so that it sees what configure_queue
-- or configure_cluster wrote in the same statement.
create function fairq._meter_limits(p_scope text) returns fairq.groups
language sql
volatile
set search_path = ''
as $$
  select g.*
  from (values (1)) one
  left join fairq.groups g on g.shard_no = 0 and g.queue = '#meters' and g.group_key = p_scope
$$;
comment on function fairq._meter_limits(text) is 'The limits of a whole queue or of the cluster.';

-- sql/functions/_meters_of.sql

create function fairq._meters_of(p_queue text) returns integer
language plpgsql
stable
set search_path = ''
as $$
begin
  return ((case when fairq._counts((fairq._lane(0, '#meters', 'queue ' || p_queue)).policy) then 1 else 0 end)
    + (case when fairq._counts((fairq._lane(0, '#meters', 'cluster')).policy) then 2 else 0 end))::integer;
end;
$$;
comment on function fairq._meters_of(text) is 'In which meters a task of this queue holds a place: 1 its queue, 2 the cluster.';

-- sql/functions/_move_clock.sql

-- The clock moves to the address of the first task still queued or still waiting, whichever is first. A pop in flight counts as queued, so what it puts back
-- lies at or after the clock. With nothing left the clock goes to the end of the busy period, the highest finish tag, so nobody pays for the past.
-- clock_position is the lower bound of scans inside the block: right after the lane before the next one, so the dead rows of the lanes already
-- served lie behind it; newcomers get the positions in between, one after the other.
create function fairq._move_clock(p_tick fairq.ticks, p_block bigint, p_position bigint) returns fairq.ticks
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_is_same_block boolean;
begin
  if p_block is null or (p_tick.horizon, p_tick.horizon_position) < (p_block, p_position) then
    p_block := p_tick.horizon;
    p_position := p_tick.horizon_position;
  end if;
  if p_block is null then
    p_block := greatest(p_tick.clock, p_tick.top);
    p_position := case when p_block = p_tick.clock then p_tick.clock_position else 1 end;
  end if;

  v_is_same_block := p_block = p_tick.clock;
  p_tick.clock := p_block;
  p_tick.clock_position := case
    when p_position = fairq._lane_position(p_position >> 20) then greatest(1, p_position - 1048575)
    else p_position
  end;
  p_tick.newcomer_position := case
    when v_is_same_block then greatest(p_tick.newcomer_position, p_tick.clock_position - 1)
    else p_tick.clock_position - 1
  end;
  return p_tick;
end;
$$;
comment on function fairq._move_clock(fairq.ticks, bigint, bigint) is 'Moves the clock to the first task that is queued or waits.';

-- sql/functions/_next_tasks.sql

-- The next tasks of a lane without concurrency keys, in order of priority and of becoming runnable; of each priority p_limit at most.
-- One with a key may be among them all the same, when it committed after the rings were heard: the lane has to stop there until its ring is.
-- One statement, stable, without "set search_path": so it is inlined into _admit, and costs no executor start for every lane.
-- Cost: tasks_overflow_idx from the cursors.
create function fairq._next_tasks(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_cursors fairq.cursor[],
  p_weight double precision,
  p_pace fairq.pace,
  p_limit integer,
  p_now timestamptz
) returns table (ctid tid, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, has_key boolean)
language sql
stable
as $$
  select o.ctid, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end,
    o.has_key
  from unnest(p_cursors) c
  cross join lateral (
    select t.ctid, t.priority, t.sequence, t.cost, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      t.concurrency_key is not null as has_key,
      case when p_pace is distinct from null then fairq._expected(p_pace, t.kind, t.cost) end as charge
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.state = 'overflow'
      and t.priority = c.priority
      and t.sequence >= c.sequence
    order by t.sequence
    limit p_limit
  ) o
$$;
comment on function fairq._next_tasks(integer, text, text, fairq.cursor[], double precision, fairq.pace, integer, timestamptz) is
  'The next tasks of a lane without concurrency keys.';

-- sql/functions/_obstacles.sql

-- What keeps a waiting task from being served now, beside its turn: a paused queue, the limits of its group, key, queue and of the cluster, in the order in
-- which it meets them. Reads the same lanes and the same _allowance as promotion and pop.
create function fairq._obstacles(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_concurrency_key text,
  p_state text,
  p_now timestamptz
) returns table (nth integer, reason text, look_at timestamptz)
language plpgsql
stable
rows 1
set search_path = ''
as $$
declare
  v_scope record;
  v_lane fairq.lanes;
  v_allowance fairq.allowance;
  v_holders text;
begin
  nth := 1;
  select format('queue "%s" is paused since %s', q.queue, q.paused_at) into reason
  from fairq.queues q
  where q.queue = p_queue
    and q.paused_at is not null;
  if found then
    return next;
  end if;

  for v_scope in
    values
      (2, p_shard_no, p_queue, p_group_key, format('group "%s"', p_group_key), p_state <> 'queued'),
      (3, p_shard_no, '#keys', p_concurrency_key, format('concurrency key "%s"', p_concurrency_key), p_state = 'blocked'),
      (4, 0, '#meters', 'queue ' || p_queue, format('queue "%s"', p_queue), true),
      (5, 0, '#meters', 'cluster', 'the cluster', true)
  loop
    continue when v_scope.column4 is null or not v_scope.column6;
    v_lane := fairq._lane(v_scope.column2, v_scope.column3, v_scope.column4);
    continue when v_lane.policy is null;
    v_allowance := fairq._allowance(v_lane.policy, v_lane.gate, p_now);
    continue when v_allowance.tasks > 0;
    nth := v_scope.column1;
    look_at := v_allowance.look_at;
    reason := format('%s: %s', v_scope.column5, v_allowance.reason);
    if v_scope.column3 = '#keys' then
      select string_agg(h.id::text, ', ' order by h.id) into v_holders
      from (
        select t.id
        from fairq.tasks t
        where t.shard_no = p_shard_no
          and t.concurrency_key = p_concurrency_key
          and t.block is not null
        limit 5
      ) h;
      reason := format('%s; held by task %s', reason, coalesce(v_holders, 'none'));
    end if;
    return next;
  end loop;
end;
$$;
comment on function fairq._obstacles(integer, text, text, text, text, timestamptz) is 'What keeps a waiting task from being served, beside its turn.';

-- sql/functions/_place.sql

-- Gives waiting tasks their addresses: overflow -> queued. By ctid and no other way, see _hold.
-- Locks: tasks, the rows named; the caller holds the domain.
create function fairq._place(p_shard_no integer, p_ctids tid[], p_blocks bigint[], p_positions bigint[], p_counted boolean[], p_charges double precision[]) returns integer
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_count integer;
begin
  update fairq.tasks t
  set state = 'queued', block = m.block, position = m.position, counted = m.counted, charge = m.charge
  from unnest(p_ctids, p_blocks, p_positions, p_counted, p_charges) as m(ctid, block, position, counted, charge)
  where t.shard_no = p_shard_no
    and t.ctid = m.ctid;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function fairq._place(integer, tid[], bigint[], bigint[], boolean[], double precision[]) is 'Gives waiting tasks their addresses.';

-- sql/functions/_policy.sql

-- What applies to a group: its own settings, else those of its queue; null when nothing limits it, so that ordinary groups pay nothing.
create function fairq._policy(p_queue fairq.queues, p_group fairq.groups) returns fairq.policy
language plpgsql
immutable
set search_path = ''
as $$
declare
  v_policy fairq.policy;
  v_rate_limit integer := coalesce(p_group.rate_limit, p_queue.group_rate_limit);
begin
  v_policy.max_running := coalesce(p_group.max_running, p_queue.group_max_running);
  v_policy.paused_at := p_group.paused_at;
  if v_rate_limit is not null then
    v_policy.rate_seconds := (extract(epoch from coalesce(p_group.rate_period, p_queue.group_rate_period)) / v_rate_limit)::double precision;
    v_policy.rate_burst := coalesce(p_group.rate_burst, p_queue.group_rate_burst, least(2147483647, greatest(1, ceil(1 / v_policy.rate_seconds)))::integer);
  end if;
  v_policy.breaker_threshold := coalesce(p_group.breaker_threshold, p_queue.group_breaker_threshold);
  v_policy.breaker_cooldown := coalesce(p_group.breaker_cooldown, p_queue.group_breaker_cooldown);
  if v_policy.max_running is null and v_policy.paused_at is null and v_rate_limit is null and v_policy.breaker_threshold is null then
    return null;
  end if;
  return v_policy;
end;
$$;
comment on function fairq._policy(fairq.queues, fairq.groups) is 'What limits a group; null: nothing does.';

-- sql/functions/_pop.sql

-- Pops from one domain. Reads the ready index from the clock up to the horizon, in served order, and takes what nobody else is taking.
-- A row that another session pops is skipped; one that another session popped after our snapshot fails the recheck of its state and is
-- skipped too; one whose popper rolls back becomes visible again at the same address.
-- Promotes when there is news, when the ready set runs short, and, for the next caller, when this pop passed the middle of it.
-- Another session that holds the domain's lock is promoting already; it is waited for only when there is nothing else to do, and not for long. p_may_wait
-- says that this call holds nothing in another shard yet: who promotes all shards in their order may be waiting for just that.
-- Goes on until it has what was asked for, or a round changed nothing: a round may meet only tasks that expired, lanes whose tasks were
-- cancelled, or a schedule that it hears of when it is due already. The bound on rounds is a matter of cost only; the next pop goes on.
-- A paused queue gives nothing; one with a cap, rate or breaker of its own, or of the cluster, asks the meters first.
-- Locks: the worker's row, shared; #meters where there are any; tasks, the rows it returns; the domain while promoting.
-- Cost: p_limit entries of tasks_ready_idx plus those popped since the last tick.
create function fairq._pop(
  p_shard_no integer,
  p_queue text,
  p_limit integer,
  p_worker_id bigint,
  p_claim_lease interval,
  p_may_wait boolean
) returns setof fairq.tasks
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_left integer := p_limit;
  v_picked record;
  v_meters integer := 0;
  v_before fairq.ticks;
  v_promoted integer;
  v_waited boolean := false;
  v_used_up bigint;
begin
  perform fairq._touch_worker(p_shard_no, p_worker_id, v_now, true);
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.paused_at is not null then
    return;
  end if;
  if v_queue.metered then
    v_left := fairq._meter(p_queue, p_limit, v_now, p_claim_lease);
    p_limit := v_left;
    v_meters := fairq._meters_of(p_queue);
    if v_left < 1 then
      return;
    end if;
  end if;

  for v_round in 1 .. 100 loop
    select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    v_before := v_tick;
    v_promoted := null;
    if v_round > 1 or v_tick.tick is null or fairq._has_news(v_tick) then
      v_promoted := fairq._promote(p_shard_no, p_queue, greatest(p_limit, fairq._ready_target(p_shard_no, v_queue)), false, v_used_up);
      select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    end if;

    select array_agg(n.ctid) filter (where not n.is_expired) as ready, array_agg(n.ctid) filter (where n.is_expired) as expired,
      max(array[n.block, n.position]) as last_address
    into v_picked
    from (
      select t.ctid, t.block, t.position, t.expires_at is not null and t.expires_at <= v_now as is_expired
      from fairq.tasks t
      where t.shard_no = p_shard_no
        and t.queue = p_queue
        and t.state = 'queued'
        and (t.block, t.position) >= (v_tick.clock, v_tick.clock_position)
        and (t.block, t.position) < (coalesce(v_tick.horizon, 9223372036854775807), coalesce(v_tick.horizon_position, 0))
      order by t.block, t.position
      limit v_left
      for update skip locked
    ) n;

    if v_picked.expired is not null then
      perform fairq._end_tasks(p_shard_no, v_picked.expired, 'expired', null, v_now);
    end if;
    if v_picked.ready is not null then
      return query select h.* from fairq._hold(p_shard_no, v_picked.ready, p_worker_id, p_claim_lease, v_now, v_meters) h;
      v_left := v_left - cardinality(v_picked.ready);
    end if;

    exit when v_left = 0;
    v_used_up := v_tick.tick;
    if v_promoted is null and v_left = p_limit and v_picked.expired is null and p_may_wait and not v_waited
      and (v_round > 1 or v_tick.tick is null or fairq._has_news(v_tick))
    then
      -- Somebody else promotes, and there is nothing else to do: that takes milliseconds. Then look again. Not with tasks in hand: who holds
      -- the domain to set a first cap waits for those.
      v_waited := true;
      continue when fairq._await_domain(p_shard_no, p_queue);
    end if;
    exit when v_tick.horizon is null and v_picked.expired is null and not fairq._has_news(v_tick);
    -- Somebody else promotes, or the news is none that a promotion can act on (a due task that another transaction holds).
    exit when v_round > 1 and v_picked.ready is null and v_picked.expired is null
      and (v_promoted is null or v_promoted = 0 and v_tick.horizon is null and v_tick.next_xid = v_before.next_xid
        and v_tick.next_due_at is not distinct from v_before.next_due_at);
  end loop;
  if v_queue.metered and v_left < p_limit then
    perform fairq._charge_meters(p_queue, p_limit - v_left, v_now);
  end if;

  if v_left = 0 and v_tick.horizon is not null and v_picked.last_address >= array[v_tick.refill_block, v_tick.refill_position] then
    perform fairq._promote(p_shard_no, p_queue, fairq._ready_target(p_shard_no, v_queue), false);
  end if;
end;
$$;
comment on function fairq._pop(integer, text, integer, bigint, interval, boolean) is 'Pops from one domain.';

-- sql/functions/_promote.sql

-- Promotion of one domain, top to bottom: due tasks, keys, rings, recalls, cancellations, admission, tick.
-- Returns the number of tasks promoted, null when another session is at it and p_wait is false.
-- p_used_up is the tick whose ready set the caller found used up: what is still queued before the horizon is being popped by others, and a pop
-- in flight, or one whose client hangs, must not keep the rest waiting. Who promoted since has seen to it: callers that waited for the lock
-- would each add another ready set.
-- Raises QF003, QF005 (see _lock_domain).
-- Locks: domains, then tasks and lanes as the parts say; all until the end of the transaction.
-- Killed anywhere, the transaction rolls back and the next promotion starts from the last committed tick.
create function fairq._promote(p_shard_no integer, p_queue text, p_limit integer, p_wait boolean, p_used_up bigint default null)
returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_now timestamptz;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_first record;
  v_heard record;
  v_recall record;
  v_cancelled text[];
  v_short boolean;
  v_refill boolean;
  v_done record;
  v_look_at timestamptz;
  v_due_at timestamptz;
begin
  if not fairq._lock_domain(p_shard_no, p_queue, p_wait) then
    return null;
  end if;
  v_now := fairq._now();
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if not found then
    v_tick := fairq._rebuild(p_shard_no, v_queue, v_now);
  end if;

  -- Concurrency keys belong to all queues of the shard: their lock is held while places are taken. What was freed is heard now, and the tasks that
  -- waited for it ring below. A pop waits for that lock for a moment only: it may hold the meters, for which another transaction waits that holds
  -- the keys, because it popped another queue before.
  if v_tick.keyed then
    if not p_wait and not fairq._lock_domain(p_shard_no, '#keys', false) and not fairq._await_domain(p_shard_no, '#keys') then
      return null;
    end if;
    perform fairq._promote(p_shard_no, '#keys', 1, true);
  end if;

  -- Due tasks first: they ring, and the rings of this transaction are heard below.
  v_due_at := v_tick.next_due_at;
  if v_due_at <= v_now then
    perform fairq._wake_due(v_tick, v_now, p_limit);
    select min(t.run_at) into v_tick.next_due_at
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue
      and t.state = 'scheduled'
      and t.run_at >= v_tick.next_due_at;
  end if;

  -- The first task still queued; one that is being popped counts, too. With the horizon it gives the clock.
  select t.block, t.position into v_first
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue
    and t.state = 'queued'
    and (t.block, t.position) >= (v_tick.clock, v_tick.clock_position)
  order by t.block, t.position
  limit 1;
  v_tick := fairq._move_clock(v_tick, v_first.block, v_first.position);
  if v_tick.clock > 2305843009213693952 then
    v_first.block := v_first.block - v_tick.clock;
    v_tick := fairq._rebase(v_tick, v_tick.clock);
  end if;

  select h.* into v_heard from fairq._hear_rings(v_tick, v_queue, greatest(p_limit, 10000), v_now) h;
  if not v_tick.keyed and exists (select from unnest(v_heard.o_lanes) l where l.keyed) then
    v_tick.keyed := true;
    perform fairq._promote(p_shard_no, '#keys', 1, true);
  end if;
  if p_queue = '#keys' then
    perform fairq._unblock(p_shard_no, v_heard.o_lanes, v_now);
  end if;

  -- Lanes that may have tasks queued which should not be there: those whose waiting tasks now begin with a higher priority than the last one
  -- promoted, those that were paused, whose breaker opened or whose cap was lowered, and those of queued tasks to be cancelled, whose addresses the group gets back.
  v_cancelled := case when v_heard.o_cancelled is null then '{}' else fairq._groups_of_queued(p_shard_no, v_heard.o_cancelled) end;
  select array_agg(l.group_key) as groups, array_agg(case when not w.is_recalled then (l.cursors[1]).priority end) as priorities into v_recall
  from unnest(v_heard.o_lanes) l
  cross join lateral (
    select l.group_key = any(v_cancelled)
      or coalesce((l.policy).paused_at is not null or (l.gate).open_until > v_now or (l.gate).in_flight > (l.policy).max_running, false)
      as is_recalled
  ) w
  where l.finish > v_tick.clock
    and (w.is_recalled or (l.cursors[1]).priority > l.last_priority);
  if v_recall.groups is not null then
    v_heard.o_lanes := fairq._recall_queued(v_tick, v_heard.o_lanes, v_recall.groups, v_recall.priorities, v_now);
  end if;
  if v_heard.o_cancelled is not null then
    perform fairq._cancel_waiting(p_shard_no, v_heard.o_cancelled, v_now);
  end if;

  -- The ready set is short when pops have passed its middle, or stand at the horizon, which may lie before it: a lane of cheap tasks gets
  -- as many tasks as the others and comes less far. Then it gets p_limit more; when nothing waits for that many, what comes later goes on filling it.
  -- Otherwise only the lanes just rung are looked at, and only for what comes before the horizon, or before the end of a ready set that is full.
  v_short := coalesce(p_used_up = v_tick.tick, false) or v_first.block is null or v_tick.refill_block is null
    or (v_first.block, v_first.position) >= (v_tick.refill_block, v_tick.refill_position)
    or coalesce((v_first.block, v_first.position) >= (v_tick.horizon, v_tick.horizon_position), false);
  v_tick.filled := case when v_short then 0 else v_tick.filled end;
  v_refill := v_short or (v_tick.horizon is null and v_tick.filled < p_limit);
  if v_tick.horizon is null and not v_refill then
    v_tick.horizon := v_tick.top;
    v_tick.horizon_position := -9223372036854775808;
  end if;
  select a.* into v_done
  from fairq._admit(v_tick, v_heard.o_lanes, v_refill, case when v_refill then p_limit - v_tick.filled else p_limit end, v_now) a;

  if v_done.o_expired is not null then
    perform fairq._end_tasks(p_shard_no, v_done.o_expired, 'expired', null, v_now);
  end if;

  if v_short or (v_done.o_promoted > 0 and v_done.o_horizon < v_tick.horizon) then
    v_tick.refill_block := coalesce(v_done.o_middle, v_done.o_horizon);
    v_tick.refill_position := coalesce(v_done.o_middle_position, v_done.o_horizon_position);
  end if;

  -- A refill that did not get past the first lane: the server's clock was set back, and who had room by a rate or a breaker has none now. Those lanes
  -- look again, or everyone behind would wait with them.
  if v_refill and (v_done.o_horizon, v_done.o_horizon_position) = (v_tick.horizon, v_tick.horizon_position) then
    insert into fairq.rings (shard_no, queue, group_key)
    select p_shard_no, p_queue, l.group_key
    from fairq.lanes l
    where l.shard_no = p_shard_no
      and l.queue = p_queue
      and l.admissible
      and l.policy is distinct from null
      and (l.finish, l.position) >= (v_tick.horizon, v_tick.horizon_position)
    order by l.finish, l.position
    limit p_limit;
  end if;

  -- From where this pass began: of the lanes that are due it may have taken p_limit only.
  select l.look_at into v_look_at
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue
    and l.look_at >= least(v_due_at, v_now)
  order by l.look_at
  limit 1;

  v_tick.tick := v_tick.tick + 1;
  v_tick.created_at := v_now;
  v_tick.top := v_done.o_top;
  v_tick.filled := v_tick.filled + v_done.o_promoted;
  v_tick.horizon := v_done.o_horizon;
  v_tick.horizon_position := v_done.o_horizon_position;
  v_tick.next_xid := v_heard.o_next_xid;
  v_tick.pending := v_heard.o_pending;
  v_tick.heard_xid := pg_current_xact_id();
  v_tick.heard_ring := v_heard.o_heard_ring;
  v_tick.next_due_at := least(v_heard.o_next_due_at, v_look_at);
  v_tick.lane_count := v_heard.o_lane_count;
  v_tick.newcomer_position := v_heard.o_newcomer_position;
  perform fairq._write_tick(v_tick);
  return v_done.o_promoted;
end;
$$;
comment on function fairq._promote(integer, text, integer, boolean, bigint) is 'Promotes one domain.';

-- sql/functions/_ran.sql

create function fairq._ran(p_started_at timestamptz, p_now timestamptz) returns double precision
language sql
immutable
parallel safe
as $$ select least(3600, greatest(0, coalesce(extract(epoch from p_now - p_started_at)::double precision, 0))) $$;
comment on function fairq._ran(timestamptz, timestamptz) is
  'Seconds of worker time that an attempt counts for: from its start to now, an hour at most, so that one that hangs does not banish its group; nothing when it never started.';

-- sql/functions/_rate_scope.sql

-- The lane that a rate is charged to: of a group, or, with p_group_key null, of the queue as a whole.
-- Raises QF001 group key, QF003 unknown queue.
create function fairq._rate_scope(p_queue text, p_group_key text, out shard_no integer, out queue text, out group_key text)
language plpgsql
stable
set search_path = ''
as $$
begin
  if p_group_key is not null then
    perform fairq._check_group(p_queue, p_group_key);
    select fairq._shard_of(p_group_key, s.shard_count), p_queue, p_group_key into shard_no, queue, group_key from fairq.settings s;
    return;
  end if;
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;
  shard_no := 0;
  queue := '#meters';
  group_key := 'queue ' || p_queue;
end;
$$;
comment on function fairq._rate_scope(text, text) is 'The lane that a rate of a group, or of a whole queue, is charged to.';

-- sql/functions/_ready_target.sql

-- Four times the slots of the workers that serve the queue, and at least 1000: small enough to stay in cache, large enough that a refill is rare.
-- Where groups share time, at least 50: what is queued was charged by an estimate that may be wrong.
create function fairq._ready_target(p_shard_no integer, p_queue fairq.queues) returns integer
language plpgsql
stable
set search_path = ''
as $$
begin
  return coalesce(p_queue.ready_target, greatest(case when p_queue.fairness = 'time' then 50 else 1000 end, (
    select 4 * least(coalesce(sum(w.slots), 0), 250000)
    from fairq.workers w
    where w.shard_no = p_shard_no
      and p_queue.queue = any(w.queues)
  )))::integer;
end;
$$;
comment on function fairq._ready_target(integer, fairq.queues) is 'How many tasks a queue keeps ready.';

-- sql/functions/_rebase.sql

-- Takes the clock back to zero long before a bigint is full: blocks, finish tags and the tick move by the same distance, so the order stays as it is. With tasks of
-- cost 1 that is after 2^41 rounds; with bytes for costs it may happen in a few years.
-- Pops that read the tick before find nothing and look again.
-- Returns the tick, not yet written.
-- Locks: tasks, queued rows (a pop in flight is waited for); lanes; the caller holds the domain.
-- Cost: the ready set and all lanes of the domain.
create function fairq._rebase(p_tick fairq.ticks, p_clock bigint) returns fairq.ticks
language plpgsql
volatile
set search_path = ''
as $$
begin
  update fairq.tasks t
  set block = t.block - p_clock
  where t.shard_no = p_tick.shard_no
    and t.queue = p_tick.queue
    and t.state = 'queued';
  update fairq.lanes l
  set finish = greatest(0, l.finish - p_clock),
    pace = case when l.pace is distinct from null then ((l.pace).last_block - p_clock, (l.pace).credit, (l.pace).estimates)::fairq.pace end
  where l.shard_no = p_tick.shard_no
    and l.queue = p_tick.queue;
  delete from fairq.sweeps w where w.shard_no = p_tick.shard_no and w.what = 'lanes ' || p_tick.queue;

  p_tick.clock := 0;
  p_tick.top := p_tick.top - p_clock;
  p_tick.horizon := p_tick.horizon - p_clock;
  p_tick.refill_block := p_tick.refill_block - p_clock;
  return p_tick;
end;
$$;
comment on function fairq._rebase(fairq.ticks, bigint) is 'Takes the clock of a domain back to zero.';

-- sql/functions/_rebuild.sql

-- Makes lanes, rings and ticks anew from fairq.tasks, which is the truth (I11). Runs by itself when a domain has no tick it can trust: in a
-- new installation, and after a dump was restored.
-- What tasks and places there are, which rings that covers, and the snapshot that the new tick stores come from one statement: see _rebuild_lanes, _rebuild_places.
-- Rings of transactions still running are pending and will be heard.
-- Wishes to cancel waiting tasks are rung again.
-- Returns the tick it wrote.
-- Locks: lanes, ticks, rings, sweeps of the domain; the caller holds the domain.
-- Cost: all live tasks of the domain.
create function fairq._rebuild(p_shard_no integer, p_queue fairq.queues, p_now timestamptz) returns fairq.ticks
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_snapshot pg_snapshot;
  v_tick fairq.ticks;
begin
  delete from fairq.lanes l where l.shard_no = p_shard_no and l.queue = p_queue.queue;

  select coalesce(max(k.tick), 0) + 1 into v_tick.tick
  from fairq.ticks k
  where k.shard_no = p_shard_no
    and k.queue = p_queue.queue;
  v_tick.shard_no := p_shard_no;
  v_tick.queue := p_queue.queue;
  v_tick.created_at := p_now;
  v_tick.clock_position := 0::bigint;
  v_tick.newcomer_position := 0::bigint;
  v_tick.heard_xid := pg_current_xact_id();
  v_tick.heard_ring := 0::bigint;
  v_tick.filled := 0;
  delete from fairq.ticks k where k.shard_no = p_shard_no and k.queue = p_queue.queue;
  -- Transaction ids, ticks and the clock may start lower than the sweeps have come.
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what in ('rings ' || p_queue.queue, 'ticks ' || p_queue.queue, 'lanes ' || p_queue.queue);

  select coalesce(min(t.block) filter (where t.state = 'queued'), max(t.block), 0), coalesce(max(t.block), 0)
  into v_tick.clock, v_tick.top
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue.queue;

  v_snapshot := case
    when p_queue.internal then fairq._rebuild_places(p_shard_no, p_queue.queue)
    else fairq._rebuild_lanes(p_shard_no, p_queue, v_tick.clock, p_now)
  end;
  v_tick.next_xid := pg_snapshot_xmax(v_snapshot);
  v_tick.pending := array(
    select p.xid
    from (select pg_snapshot_xip(v_snapshot) union select pg_current_xact_id()) p(xid)
    where p.xid < v_tick.next_xid
  );

  -- A schedule or a wish told twice does no harm; one that committed before the snapshot would be told by nothing else.
  select min(t.run_at) into v_tick.next_due_at
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.queue = p_queue.queue
    and t.state = 'scheduled';

  select count(*), coalesce(bool_or(l.keyed), false), greatest(v_tick.top, max(l.finish)) into v_tick.lane_count, v_tick.keyed, v_tick.top
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue.queue;

  select l.finish, l.position into v_tick.horizon, v_tick.horizon_position
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue.queue
    and l.admissible
  order by l.finish, l.position
  limit 1;
  if v_tick.horizon is not null then
    v_tick.refill_block := v_tick.clock;
    v_tick.refill_position := v_tick.clock_position;
  end if;

  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select t.shard_no, t.queue, t.group_key, t.id
  from fairq.cancellations c
  join fairq.tasks t on t.shard_no = c.shard_no and t.id = c.task_id
  where c.shard_no = p_shard_no
    and t.queue = p_queue.queue
    and t.worker_id is null;

  perform fairq._write_tick(v_tick);
  return v_tick;
end;
$$;
comment on function fairq._rebuild(integer, fairq.queues, timestamptz) is 'Makes the derived state of a domain anew from its tasks.';

-- sql/functions/_rebuild_lanes.sql

-- The lanes of a queue anew from its tasks. One statement counts the tasks, removes the rings that these cover, and gives the snapshot. Taken a
-- moment apart, a task that ended in between would be off the count already, and its ring, which the tick holds for pending, would take it off again.
-- Returns the snapshot.
-- Locks: lanes, rings of the domain; the caller holds the domain.
-- Cost: all live tasks of the domain.
create function fairq._rebuild_lanes(p_shard_no integer, p_queue fairq.queues, p_clock bigint, p_now timestamptz) returns pg_snapshot
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_snapshot pg_snapshot;
begin
  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue.queue
  ),
  level as (
    select t.group_key, t.priority,
      min(t.sequence) as first_sequence,
      min(t.sequence) filter (where t.state = 'overflow') as waiting_from,
      max(t.block + fairq._step(coalesce(t.charge, t.cost), coalesce(g.weight, p_queue.weight))) as finish,
      max(t.block) as last_block,
      count(*) filter (where t.counted) as in_flight,
      bool_or(t.concurrency_key is not null) as keyed,
      min(t.priority) filter (where t.state = 'queued') as last_priority
    from fairq.tasks t
    left join fairq.groups g on g.shard_no = t.shard_no and g.queue = t.queue and g.group_key = t.group_key
    where t.shard_no = p_shard_no
      and t.queue = p_queue.queue
    group by t.group_key, t.priority
  ),
  lane as (
    select l.group_key,
      row_number() over (order by min(l.first_sequence)) as lane_no,
      greatest(p_clock, max(l.finish)) as finish,
      max(l.last_block) as last_block,
      sum(l.in_flight)::integer as in_flight,
      bool_or(l.keyed) as keyed,
      coalesce(min(l.last_priority), 0) as last_priority,
      coalesce(array_agg((l.priority, l.waiting_from)::fairq.cursor order by l.priority desc)
        filter (where l.waiting_from is not null), '{}') as cursors
    from level l
    group by l.group_key
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority, cursors,
      look_at, admissible)
    select p_shard_no, p_queue.queue, l.group_key, 1, l.lane_no, l.finish, fairq._lane_position(l.lane_no), coalesce(g.weight, p_queue.weight),
      l.keyed, x.policy, x.gate, case when p_queue.fairness = 'time' then (coalesce(l.last_block, -1), 0, '{}')::fairq.pace end, l.last_priority, l.cursors, null,
      l.cursors <> '{}' and (x.policy is null or (fairq._allowance(x.policy, x.gate, p_now)).tasks > 0)
    from lane l
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = p_queue.queue and g.group_key = l.group_key
    cross join lateral (
      select y.policy, case when y.policy is distinct from null then fairq._settle(y.policy, null, -l.in_flight, 0, false, p_now) end as gate
      from (select fairq._policy(p_queue, g) as policy offset 0) y
      offset 0
    ) x
  )
  select pg_current_snapshot() into v_snapshot;
  return v_snapshot;
end;
$$;
comment on function fairq._rebuild_lanes(integer, fairq.queues, bigint, timestamptz) is 'Makes the lanes of a queue anew from its tasks.';

-- sql/functions/_rebuild_places.sql

-- Keys and meters have no tasks of their own: their places are those of the tasks in flight, which ring here. Those with settings have a lane in any case.
-- A key that tasks wait for rings, too: it may have come free, and the ring that told of it is among those forgotten.
-- One statement, as in _rebuild_lanes.
-- Returns the snapshot.
-- Locks: rings of the domain; the caller holds the domain.
-- Cost: all tasks in flight, of all shards for the meters; for the keys all blocked tasks.
create function fairq._rebuild_places(p_shard_no integer, p_queue text) returns pg_snapshot
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_snapshot pg_snapshot;
begin
  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue
  ),
  configured as (
    insert into fairq.rings (shard_no, queue, group_key)
    select g.shard_no, g.queue, g.group_key
    from fairq.groups g
    where g.shard_no = p_shard_no
      and g.queue = p_queue
  ),
  waited_for as (
    insert into fairq.rings (shard_no, queue, group_key)
    select distinct t.shard_no, '#keys', t.concurrency_key
    from fairq.tasks t
    where p_queue = '#keys'
      and t.shard_no = p_shard_no
      and t.state = 'blocked'
  ),
  taken as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, -count(*)
    from fairq._shards(case when p_queue = '#keys' then p_shard_no end) x(shard_no)
    cross join lateral (
      select t.shard_no, t.queue, t.group_key, t.counted, t.meters, t.concurrency_key
      from fairq.tasks t
      where t.shard_no = x.shard_no
        and t.block is not null
        and (t.meters <> 0 or t.concurrency_key is not null)
      offset 0
    ) t
    cross join lateral fairq._scopes(t.shard_no, t.queue, t.group_key, t.counted, t.meters, t.concurrency_key) s
    where s.shard_no = p_shard_no
      and s.queue = p_queue
    group by s.shard_no, s.queue, s.group_key
  )
  select pg_current_snapshot() into v_snapshot;
  return v_snapshot;
end;
$$;
comment on function fairq._rebuild_places(integer, text) is 'Makes the places of keys or meters anew from the tasks in flight.';

-- sql/functions/_recall_queued.sql

-- A task of higher priority came for a group that already has lower ones queued: those go back in line. The lane goes back
-- to the earliest address that came free, so admission hands out the same addresses again, in order of priority.
-- The same move takes the queued tasks of a paused group out of the order (p_below = null: all of them).
-- A task that is being popped right now is locked, and keeps its address.
-- Where groups share time, finish tag and charges may differ by what corrections said since: that stays a debt or becomes credit. Otherwise
-- a group would be forgiven an hour by cancelling one task.
-- Returns the lanes as they are afterwards.
-- Locks: tasks, queued rows with "skip locked".
-- Cost: the ready set, from the clock on, and only when there is something to recall.
create function fairq._recall_queued(p_tick fairq.ticks, p_lanes fairq.lanes[], p_groups text[], p_below integer[], p_now timestamptz)
returns fairq.lanes[]
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
  v_lanes fairq.lanes[];
begin
  with queued as materialized (
    select t.ctid, t.group_key, t.priority, t.sequence, t.block, t.position, coalesce(t.charge, t.cost) as charge
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.state = 'queued'
      and (t.block, t.position) >= (p_tick.clock, p_tick.clock_position)
      and t.group_key = any(p_groups)
      and t.priority < coalesce(p_below[array_position(p_groups, t.group_key)], 2147483647)
    for update skip locked
  ),
  level as (
    select q.group_key, q.priority, min(q.sequence) as sequence, min(q.block) as block,
      min(array[q.block, q.position]) as address, count(*) as tasks, sum(q.charge) as charge
    from queued q
    group by q.group_key, q.priority
  ),
  freed as materialized (
    select l.group_key, min(l.block) as block, (min(l.address))[2] as position, sum(l.tasks)::integer as tasks, sum(l.charge) as charge,
      array_agg((l.priority, l.sequence)::fairq.cursor) as cursors
    from level l
    group by l.group_key
  )
  select (select array_agg(q.ctid) from queued q), coalesce(array_agg(
    case
      when f.group_key is null then l
      else (l.shard_no, l.last_priority, l.lane_no, l.version, greatest(f.block, f.due),
        case when f.due > f.block then fairq._lane_position(l.lane_no) else f.position end, l.weight, (f.allowance).look_at,
        l.policy is null or (f.allowance).tasks > 0, l.keyed, l.queue, l.group_key,
        array(
          select (u.priority, min(u.sequence))::fairq.cursor
          from unnest(l.cursors || f.cursors) u
          group by u.priority
          order by u.priority desc
        ), l.policy, f.gate,
        case when l.pace is distinct from null then (f.block - 1, (l.pace).credit + greatest(0, f.block - f.due), (l.pace).estimates)::fairq.pace end
      )::fairq.lanes
    end), '{}')
  into v_ctids, v_lanes
  from unnest(p_lanes) l
  left join lateral (
    select d.group_key, d.block, d.position, d.cursors, x.gate,
      -- Where the lane stands without these tasks. Each step was rounded up, by less than a unit.
      case when l.pace is distinct from null then l.finish - d.tasks - least(fairq._round() * d.charge / l.weight, 4e18)::bigint else d.block end as due,
      case when l.policy is distinct from null then fairq._allowance(l.policy, x.gate, p_now) end as allowance
    from freed d
    cross join lateral (
      -- What was charged when they were promoted is given back.
      select case when l.policy is distinct from null then fairq._charge(l.policy, l.gate, -d.tasks, p_now) else l.gate end as gate
      offset 0
    ) x
    where d.group_key = l.group_key
  ) f on true;

  if v_ctids is not null then
    perform fairq._unplace(p_tick.shard_no, v_ctids);
  end if;
  return v_lanes;
end;
$$;
comment on function fairq._recall_queued(fairq.ticks, fairq.lanes[], text[], integer[], timestamptz) is
  'Takes queued tasks of lower priority out of the order again.';

-- sql/functions/_recover_worker.sql

-- Puts the tasks of a lost worker back in line, at most p_limit of them. A running task has used its attempt up: the loss is noted in
-- fairq.attempts, and without attempts left the task ends as failed. A claimed one that never started has not.
-- The worker is struck off once nothing of it is left, so a message of its comes to nothing.
-- A task that its worker is finishing this very moment is locked and skipped: let it.
-- Returns how many tasks it took from the worker.
-- Locks: the worker's row, then tasks, both "skip locked": a worker that is popping right now is alive.
-- Cost: tasks_held_idx, entries of this worker.
create function fairq._recover_worker(p_shard_no integer, p_worker_id bigint, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lost record;
  v_error jsonb := jsonb_build_object('code', 'worker_lost', 'message', format('worker %s gave no sign of life', p_worker_id));
begin
  perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id for update skip locked;
  if not found then
    return 0;
  end if;

  -- No "order by": the planner would get it from the primary key and read all tasks of the shard. Nobody is waited for, so order is of no matter.
  with held as materialized (
    select t.ctid, t.id, t.state, t.attempt, t.max_attempts, t.started_at
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.worker_id = p_worker_id
    limit p_limit
    for update skip locked
  ),
  noted as (
    insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, outcome, error)
    select p_shard_no, h.id, h.attempt, p_worker_id, h.started_at, p_now, 'worker_lost', v_error
    from held h
    where h.state = 'running'
      and h.attempt < h.max_attempts
  )
  select count(*)::integer as tasks,
    array_agg(h.ctid) filter (where h.state = 'running' and h.attempt < h.max_attempts) as burned,
    array_agg(h.ctid) filter (where h.state = 'running' and h.attempt >= h.max_attempts) as failed,
    array_agg(h.ctid) filter (where h.state = 'claimed') as unstarted
  into v_lost
  from held h;

  if v_lost.tasks = 0 then
    if not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.worker_id = p_worker_id) then
      delete from fairq.heartbeats h where h.shard_no = p_shard_no and h.worker_id = p_worker_id;
      delete from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id;
    end if;
    return 0;
  end if;

  perform fairq._return_tasks(p_shard_no, v_lost.burned, true);
  perform fairq._return_tasks(p_shard_no, v_lost.unstarted, false);
  perform fairq._end_tasks(p_shard_no, v_lost.failed, 'failed', v_error, p_now);
  return v_lost.tasks;
end;
$$;
comment on function fairq._recover_worker(integer, bigint, integer, timestamptz) is 'Takes the tasks of a lost worker from it.';

-- sql/functions/_refuse_draining.sql

create function fairq._refuse_draining(p_queue text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  raise exception 'queue "%" is draining and takes no new tasks', p_queue
    using errcode = 'QF016',
      hint = format('It takes them again after: select fairq.resume_queue(%L);', p_queue);
end;
$$;
comment on function fairq._refuse_draining(text) is 'Raises QF016: the queue is draining.';

-- sql/functions/_refuse_queue.sql

create function fairq._refuse_queue(p_queue text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  if p_queue is null then
    raise exception 'no queue is named' using errcode = 'QF003', hint = 'For example: default. A null names none.';
  end if;
  raise exception 'there is no queue "%"', p_queue
    using errcode = 'QF003',
      hint = format('Create it with: select fairq.configure_queue(%L);', p_queue);
end;
$$;
comment on function fairq._refuse_queue(text) is 'Raises QF003: the queue is unknown.';

-- sql/functions/_remove.sql

-- Deletes rows of the engine's own notes: lanes that were replaced, rings, ticks, keys and wishes that nobody needs any more. By ctid and no
-- other way, see _hold.
-- Returns how many rows it deleted.
-- Locks: the rows named; the caller holds what protects them.
create function fairq._remove(p_shard_no integer, p_table text, p_ctids tid[]) returns integer
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_count integer;
begin
  case p_table
    when 'lanes' then delete from fairq.lanes r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'rings' then delete from fairq.rings r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'ticks' then delete from fairq.ticks r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'cancellations' then delete from fairq.cancellations r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'watches' then delete from fairq.watches r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'progress' then delete from fairq.progress r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'idempotency_keys' then delete from fairq.idempotency_keys r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
  end case;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;
comment on function fairq._remove(integer, text, tid[]) is 'Deletes rows of the engine''s notes.';

-- sql/functions/_return_tasks.sql

-- Puts held tasks back in line: through promotion again, at their old place within the group, never at a stale address (I12).
-- p_burn: the attempt is used up. Otherwise the task may have one more, and its number is not given out again all the same: worker and attempt are the
-- fencing token, and the same worker may take the task again while a message about the first time is still under way (I10).
-- The caller has locked the tasks.
-- By ctid and no other way, see _hold.
-- Returns how many it put back.
-- Locks: tasks, the rows named.
create function fairq._return_tasks(p_shard_no integer, p_ctids tid[], p_burn boolean) returns integer
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_ids bigint[];
begin
  with held as materialized (
    select t.ctid, t.counted, t.meters, t.started_at
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    for update
  ),
  returned as (
    update fairq.tasks t
    set state = 'overflow', block = null, position = null, worker_id = null, started_at = null, lease_expires_at = null, counted = false, meters = 0,
      max_attempts = t.max_attempts + case when p_burn then 0 else 1 end
    from held h
    where t.shard_no = p_shard_no
      and t.ctid = h.ctid
    returning t.id, t.queue, t.group_key, t.priority, t.sequence, t.concurrency_key, t.charge, h.counted, h.meters, h.started_at
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
    select p_shard_no, r.queue, r.group_key, r.priority, min(r.sequence), bool_or(r.concurrency_key is not null)
    from returned r
    group by r.queue, r.group_key, r.priority
  ),
  timed as (
    insert into fairq.rings (shard_no, queue, group_key, correction)
    select p_shard_no, r.queue, r.group_key, sum(fairq._ran(r.started_at, fairq._now()) - r.charge)
    from returned r
    where r.charge is not null
    group by r.queue, r.group_key
  ),
  freed as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select s.shard_no, s.queue, s.group_key, count(*)
    from returned r
    cross join lateral fairq._scopes(p_shard_no, r.queue, r.group_key, r.counted, r.meters, r.concurrency_key) s
    group by s.shard_no, s.queue, s.group_key
  )
  select array_agg(r.id) into v_ids from returned r;
  perform fairq._ring_wishes(p_shard_no, v_ids);
  return coalesce(cardinality(v_ids), 0);
end;
$$;
comment on function fairq._return_tasks(integer, tid[], boolean) is 'Puts held tasks back in line.';

-- sql/functions/_ring_group.sql

-- "Look at this group": its settings changed. Workers that sleep are woken.
create function fairq._ring_group(p_shard_no integer, p_queue text, p_group_key text) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  insert into fairq.rings (shard_no, queue, group_key) values (p_shard_no, p_queue, p_group_key);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
end;
$$;
comment on function fairq._ring_group(integer, text, text) is 'Rings a group whose settings changed.';

-- sql/functions/_ring_wishes.sql

-- Tasks that come back in line although somebody wished to cancel them: the wish is rung again, since the ring that told of it was heard while the task
-- was held.
create function fairq._ring_wishes(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = on
as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select p_shard_no, t.queue, t.group_key, t.id
  from unnest(p_ids) i(id)
  cross join lateral (
    select k.id, k.queue, k.group_key
    from fairq.tasks k
    where k.shard_no = p_shard_no
      and k.id = i.id
      and k.worker_id is null
      and exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
    offset 0
  ) t;
end;
$$;
comment on function fairq._ring_wishes(integer, bigint[]) is 'Rings again for tasks to be cancelled that came back in line.';

-- sql/functions/_rotate_partitions.sql

-- Makes the day partitions of the history up to a week ahead, and drops those past every queue's retention.
-- SECURITY DEFINER, the only one: whoever may run fairq.maintain() need not own the tables. It takes no argument, so there is nothing to
-- inject: the names of the partitions are computed from dates.
-- A day that the default partition already has rows of gets none. A table that is locked is left for the next time.
-- Returns how many partitions it made and dropped.
-- Locks: ACCESS EXCLUSIVE on the partition dropped and on the history table, for a moment, waited for 100 ms at most.
create function fairq._rotate_partitions() returns integer
language plpgsql
volatile
security definer
set search_path = ''
set lock_timeout = '100ms'
set timezone = 'UTC'
as $$
declare
  v_today date := (fairq._now() at time zone 'UTC')::date;
  v_parent text;
  v_key text;
  v_day date;
  v_name text;
  v_covered boolean;
  v_keep_from date;
  v_changed integer := 0;
begin
  select v_today - ceil(extract(epoch from max(q.retention)) / 86400)::integer into v_keep_from
  from fairq.queues q
  where not q.internal;

  for v_parent, v_key in values ('finished_tasks', 'finished_at'), ('attempts', 'ended_at') loop
    for v_day in select v_today + g.d from generate_series(0, 7) g(d) loop
      v_name := format('%s_%s', v_parent, to_char(v_day, 'YYYYMMDD'));
      continue when to_regclass(format('fairq.%I', v_name)) is not null;
      execute format('select exists (select from fairq.%I where %I >= $1 and %I < $2)', v_parent || '_default', v_key, v_key)
        into v_covered using v_day::timestamptz, (v_day + 1)::timestamptz;
      continue when v_covered;
      begin
        execute format('create table fairq.%I partition of fairq.%I for values from (%L) to (%L)', v_name, v_parent,
          v_day::timestamptz, (v_day + 1)::timestamptz);
        -- Not inherited. See 030_tables.sql.
        execute format('alter table fairq.%I replica identity full', v_name);
        v_changed := v_changed + 1;
      exception when lock_not_available or duplicate_table or check_violation then
        null;
      end;
    end loop;

    for v_name in
      select c.relname::text
      from pg_catalog.pg_inherits i
      join pg_catalog.pg_class c on c.oid = i.inhrelid
      where i.inhparent = format('fairq.%I', v_parent)::regclass
        and c.relname ~ '_[0-9]{8}$'
        and to_date(right(c.relname, 8), 'YYYYMMDD') < v_keep_from
    loop
      begin
        execute format('drop table fairq.%I', v_name);
        v_changed := v_changed + 1;
      exception when lock_not_available then
        null;
      end;
    end loop;
  end loop;
  return v_changed;
end;
$$;
comment on function fairq._rotate_partitions() is 'Makes and drops the day partitions of the history.';

-- sql/functions/_scopes.sql

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

-- sql/functions/_set_limits.sql

-- Writes the settings of one lane: of a group, of a concurrency key (queue #keys), of a queue or the cluster (queue #meters). Null leaves a setting as it is,
-- a name in p_reset removes it. The lane is rung and looks its policy up again.
-- Raises QF007, QF009 (see _check_policy). What p_reset may name the caller has checked.
-- Locks: groups, one row.
create function fairq._set_limits(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_weight double precision,
  p_max_running integer,
  p_rate_limit integer,
  p_rate_period interval,
  p_rate_burst integer,
  p_breaker_threshold integer,
  p_breaker_cooldown interval,
  p_reset text[]
) returns fairq.groups
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_group fairq.groups;
begin
  perform fairq._check_policy(p_group_key, p_weight, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold,
    p_breaker_cooldown);
  insert into fairq.groups (shard_no, queue, group_key) values (p_shard_no, p_queue, p_group_key) on conflict do nothing;
  select g.* into v_group
  from fairq.groups g
  where g.shard_no = p_shard_no
    and g.queue = p_queue
    and g.group_key = p_group_key
  for update;

  if 'weight' = any(p_reset) then
    v_group.weight := null;
  end if;
  if 'max_running' = any(p_reset) then
    v_group.max_running := null;
  end if;
  if 'rate' = any(p_reset) then
    v_group.rate_limit := null;
    v_group.rate_period := null;
    v_group.rate_burst := null;
  end if;
  if 'breaker' = any(p_reset) then
    v_group.breaker_threshold := null;
    v_group.breaker_cooldown := null;
  end if;
  if coalesce(p_rate_limit, v_group.rate_limit) is null and p_rate_period is not null
    or coalesce(p_breaker_threshold, v_group.breaker_threshold) is null and p_breaker_cooldown is not null
  then
    raise exception 'a rate period or a breaker cooldown alone says nothing: %', p_group_key
      using errcode = 'QF007', hint = 'Set the rate limit or the breaker threshold with it.';
  end if;
  v_group.weight := coalesce(p_weight, v_group.weight);
  v_group.max_running := coalesce(p_max_running, v_group.max_running);
  v_group.rate_limit := coalesce(p_rate_limit, v_group.rate_limit);
  v_group.rate_burst := coalesce(p_rate_burst, v_group.rate_burst);
  v_group.breaker_threshold := coalesce(p_breaker_threshold, v_group.breaker_threshold);
  if v_group.rate_limit is not null then
    v_group.rate_period := coalesce(p_rate_period, v_group.rate_period, interval '1 second');
  end if;
  if v_group.breaker_threshold is not null then
    v_group.breaker_cooldown := coalesce(p_breaker_cooldown, v_group.breaker_cooldown, interval '1 minute');
  end if;

  update fairq.groups g
  set weight = v_group.weight, max_running = v_group.max_running, rate_limit = v_group.rate_limit, rate_period = v_group.rate_period,
    rate_burst = v_group.rate_burst, breaker_threshold = v_group.breaker_threshold, breaker_cooldown = v_group.breaker_cooldown
  where g.shard_no = p_shard_no
    and g.queue = p_queue
    and g.group_key = p_group_key;
  perform fairq._ring_group(p_shard_no, p_queue, p_group_key);
  return v_group;
end;
$$;
comment on function fairq._set_limits(integer, text, text, double precision, integer, integer, interval, integer, integer, interval, text[]) is
  'Writes the settings of a group, key, queue or of the cluster.';

-- sql/functions/_set_sweep_floor.sql

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

-- sql/functions/_settle.sql

-- The gate after the news of tasks that left: places come free; failures in a row open the breaker, a success closes it. p_failures
-- counts those after the last success, p_succeeded says whether there was one.
-- Settings may have changed since. Places are kept even without any, while tasks that hold one are about to report it; nothing left to keep is null.
create function fairq._settle(
  p_policy fairq.policy,
  p_gate fairq.gate,
  p_freed integer,
  p_failures integer,
  p_succeeded boolean,
  p_now timestamptz
) returns fairq.gate
language plpgsql
immutable
set search_path = ''
as $$
begin
  p_gate.in_flight := coalesce(p_gate.in_flight, 0) - p_freed;
  if p_policy is not distinct from null and p_gate.in_flight = 0 then
    return null;
  end if;
  -- Tasks of before the rate was raised are paid for at the new rate: never more than one burst is owed.
  p_gate.rate_at := case
    when p_policy.rate_seconds is not null and p_gate.rate_at is not null
      then least(p_gate.rate_at, p_now + p_policy.rate_burst * p_policy.rate_seconds * interval '1 second')
  end;
  if p_policy.breaker_threshold is null then
    p_gate.failures := 0;
    p_gate.open_until := null;
    p_gate.probe_until := null;
    return p_gate;
  end if;

  if p_succeeded then
    p_gate.failures := 0;
    p_gate.open_until := null;
    p_gate.probe_until := null;
  end if;
  if p_failures > 0 then
    p_gate.failures := coalesce(p_gate.failures, 0) + p_failures;
    -- A failure while it is open is one of the tasks that were in flight when it opened: it prolongs nothing. One while it is half open is the probe.
    if p_gate.failures >= p_policy.breaker_threshold and (p_gate.open_until is null or p_gate.open_until <= p_now) then
      p_gate.open_until := p_now + p_policy.breaker_cooldown;
      p_gate.probe_until := null;
    end if;
  end if;
  return p_gate;
end;
$$;
comment on function fairq._settle(fairq.policy, fairq.gate, integer, integer, boolean, timestamptz) is
  'The gate of a lane after the news of tasks that left.';

-- sql/functions/_shards.sql

create function fairq._shards(p_shard_no integer) returns setof integer
language sql
stable
rows 1
as $$
  select generate_series(coalesce(p_shard_no, 0), coalesce(p_shard_no, s.shard_count - 1))
  from fairq.settings s
$$;
comment on function fairq._shards(integer) is 'The shard named, or all of them.';

-- sql/functions/_start.sql

-- Claimed tasks that the caller has locked begin to run, unless their deadline or their lease has passed. By ctid and no other way, see _hold.
-- Returns the ids to run.
create function fairq._start(p_shard_no integer, p_ctids tid[], p_now timestamptz) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
declare
  v_expired tid[];
begin
  select array_agg(t.ctid) into v_expired
  from fairq.tasks t
  where t.shard_no = p_shard_no
    and t.ctid = any(p_ctids)
    and t.expires_at <= p_now;
  if v_expired is not null then
    perform fairq._end_tasks(p_shard_no, v_expired, 'expired', null, p_now);
  end if;
  return query
    update fairq.tasks t
    set state = 'running', started_at = p_now, lease_expires_at = null
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
      and t.lease_expires_at > p_now
    returning t.id;
end;
$$;
comment on function fairq._start(integer, tid[], timestamptz) is 'Claimed tasks begin to run.';

-- sql/functions/_sweep_domain.sql

-- Removes what promotion has left behind in a domain: rings every later tick would ignore, ticks but the last, lanes of groups that are idle and
-- whose turn is used up (they would start at the clock anyway). At most p_limit of each.
-- Returns how many rows it removed.
-- enable_sort is off: the rows come in the order of an index, and another index with a sort behind it would read all of them.
-- Locks: the rows it removes; the caller holds the domain.
create function fairq._sweep_domain(p_shard_no integer, p_queue text, p_limit integer) returns integer
language plpgsql
volatile
set search_path = ''
set enable_sort = off
as $$
declare
  v_tick fairq.ticks;
  v_floor bigint;
  v_rings record;
  v_late integer;
  v_ticks record;
  v_lanes record;
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if not found then
    return 0;
  end if;

  -- Rings of transactions that were open when a sweep passed them are named in fairq.sweeps, and removed once they are heard: the floor
  -- does not wait for the longest transaction.
  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'rings ' || p_queue), 0);
  with heard as materialized (
    select r.ctid, r.xid
    from fairq.rings r
    where r.shard_no = p_shard_no
      and r.queue = p_queue
      and r.xid >= v_floor::text::xid8
      and r.xid < v_tick.next_xid
      and r.xid <> v_tick.heard_xid
      and r.xid <> all(v_tick.pending)
    order by r.xid
    limit p_limit
  )
  select count(*)::integer as swept, array_agg(h.ctid) as ctids, max(h.xid::text::bigint) as last into v_rings from heard h;
  perform fairq._remove(p_shard_no, 'rings', v_rings.ctids);
  v_late := fairq._sweep_late_rings(p_shard_no, p_queue, v_tick, v_rings.last);
  perform fairq._set_sweep_floor(p_shard_no, 'rings ' || p_queue, v_rings.last);

  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'ticks ' || p_queue), 0);
  with old as materialized (
    select k.ctid, k.tick
    from fairq.ticks k
    where k.shard_no = p_shard_no
      and k.queue = p_queue
      and k.tick >= v_floor
      and k.tick < v_tick.tick
    order by k.tick
    limit p_limit
  )
  select count(*)::integer as swept, array_agg(o.ctid) as ctids, max(o.tick) as last into v_ticks from old o;
  perform fairq._remove(p_shard_no, 'ticks', v_ticks.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'ticks ' || p_queue, v_ticks.last);

  -- A rate that is not paid for keeps its lane for now, and the floor before it: the lane does not ring when it is. One whose breaker has
  -- counted failures stays until the group succeeds; that rings.
  v_floor := coalesce(fairq._sweep_floor(p_shard_no, 'lanes ' || p_queue), 0);
  with idle as materialized (
    select l.ctid, l.finish, coalesce((l.gate).rate_at, '-infinity') <= fairq._now() as is_paid
    from fairq.lanes l
    where l.shard_no = p_shard_no
      and l.queue = p_queue
      and not l.admissible
      -- A meter is asked without looking at the settings: its lane is never missing.
      and l.queue <> '#meters'
      and l.finish >= v_floor
      and l.finish <= v_tick.clock
      and l.cursors = '{}'
      and (l.gate is null or (l.gate).in_flight = 0 and (l.gate).open_until is null and coalesce((l.gate).failures, 0) = 0)
    order by l.finish
    limit p_limit
  )
  select count(*) filter (where i.is_paid)::integer as swept, array_agg(i.ctid) filter (where i.is_paid) as ctids,
    coalesce(min(i.finish) filter (where not i.is_paid), max(i.finish)) as last
  into v_lanes
  from idle i;
  perform fairq._remove(p_shard_no, 'lanes', v_lanes.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'lanes ' || p_queue, v_lanes.last);

  return v_rings.swept + v_late + v_ticks.swept + v_lanes.swept;
end;
$$;
comment on function fairq._sweep_domain(integer, text, integer) is 'Removes rings, ticks and lanes that nobody needs any more.';

-- sql/functions/_sweep_floor.sql

create function fairq._sweep_floor(p_shard_no integer, p_what text) returns bigint
language sql
stable
as $$
  select max(w.floor) from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what
$$;
comment on function fairq._sweep_floor(integer, text) is 'Where the next sweep of a kind starts; null: at the beginning.';

-- sql/functions/_sweep_keys.sql

-- Removes wishes to cancel and progress whose task is gone, watches that ran out, idempotency keys whose task is gone for longer than the retention, and rows of the
-- history's default partitions past every queue's. At most p_limit of each.
-- Returns how many rows it removed.
create function fairq._sweep_keys(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_swept integer := 0;
  v_rows integer;
  v_floor timestamptz := coalesce(to_timestamp(fairq._sweep_floor(p_shard_no, 'keys') / 1000000.0), '-infinity');
begin
  v_swept := v_swept + fairq._remove(p_shard_no, 'cancellations', array(
    select n.ctid
    from fairq.cancellations n
    where n.shard_no = p_shard_no
      and not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.id = n.task_id offset 0)
    limit p_limit
  ));

  v_swept := v_swept + fairq._remove(p_shard_no, 'watches', array(
    select n.ctid
    from fairq.watches n
    where n.shard_no = p_shard_no
      and n.until < p_now
    limit p_limit
  ));

  v_swept := v_swept + fairq._remove(p_shard_no, 'progress', array(
    select n.ctid
    from fairq.progress n
    where n.shard_no = p_shard_no
      and not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.id = n.task_id offset 0)
    limit p_limit
  ));

  v_swept := v_swept + fairq._remove(p_shard_no, 'idempotency_keys', array(
    select n.ctid
    from fairq.idempotency_keys n
    join fairq.queues q on q.queue = n.queue
    where n.shard_no = p_shard_no
      and n.created_at >= v_floor
      and n.created_at < p_now - q.retention
      and not exists (select from fairq.tasks t where t.shard_no = p_shard_no and t.id = n.task_id offset 0)
      and not exists (select from fairq.finished_tasks f where f.shard_no = p_shard_no and f.id = n.task_id and f.finished_at >= p_now - q.retention)
    order by n.created_at
    limit p_limit
    for update of n skip locked
  ));
  -- The next sweep starts at the oldest key left.
  select n.created_at into v_floor
  from fairq.idempotency_keys n
  where n.shard_no = p_shard_no
    and n.created_at >= v_floor
  order by n.created_at
  limit 1;
  perform fairq._set_sweep_floor(p_shard_no, 'keys', (extract(epoch from v_floor) * 1000000)::bigint);

  delete from fairq.finished_tasks_default f
  where f.ctid = any(array(
    select n.ctid
    from fairq.finished_tasks_default n
    where n.shard_no = p_shard_no
      and n.finished_at < p_now - (select max(q.retention) from fairq.queues q where not q.internal)
    order by n.finished_at
    limit p_limit
  ));
  get diagnostics v_rows = row_count;
  v_swept := v_swept + v_rows;

  delete from fairq.attempts_default a
  where a.ctid = any(array(
    select n.ctid
    from fairq.attempts_default n
    where n.shard_no = p_shard_no
      and n.ended_at < p_now - (select max(q.retention) from fairq.queues q where not q.internal)
    order by n.ended_at
    limit p_limit
  ));
  get diagnostics v_rows = row_count;
  return v_swept + v_rows;
end;
$$;
comment on function fairq._sweep_keys(integer, integer, timestamptz) is 'Removes keys, wishes and history that nobody needs any more.';

-- sql/functions/_sweep_late_rings.sql

-- Rings of transactions that were still open when the sweep of rings passed them: remembered here, by id, and removed when a tick has heard them.
-- Returns how many rings it removed.
create function fairq._sweep_late_rings(p_shard_no integer, p_queue text, p_tick fairq.ticks, p_passed bigint)
returns integer
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_what text := 'late rings ' || p_queue;
  v_open bigint[] := array(
    select x.id
    from (
      select p.xid::text::bigint from unnest(p_tick.pending) p(xid)
      union
      select p_tick.heard_xid::text::bigint
    ) x(id)
    where x.id <= p_passed
  );
  v_done bigint[];
begin
  insert into fairq.sweeps (shard_no, what, floor)
  select p_shard_no, v_what, o.id
  from unnest(v_open) o(id)
  on conflict do nothing;

  v_done := array(
    select w.floor
    from fairq.sweeps w
    where w.shard_no = p_shard_no
      and w.what = v_what
      and w.floor < p_tick.next_xid::text::bigint
      and w.floor <> p_tick.heard_xid::text::bigint
      and w.floor::text::xid8 <> all(p_tick.pending)
    order by w.floor
    limit 1000
  );
  delete from fairq.sweeps w where w.shard_no = p_shard_no and w.what = v_what and w.floor = any(v_done);
  return fairq._remove(p_shard_no, 'rings', array(
    select r.ctid
    from unnest(v_done) d(xid)
    cross join lateral (
      select k.ctid
      from fairq.rings k
      where k.shard_no = p_shard_no
        and k.queue = p_queue
        and k.xid = d.xid::text::xid8
      offset 0
    ) r
  ));
end;
$$;
comment on function fairq._sweep_late_rings(integer, text, fairq.ticks, bigint) is 'Removes rings of transactions that were open when the sweep passed them.';

-- sql/functions/_take_keys.sql

-- The next tasks of a lane some of which have concurrency keys, in order: those without a key, and those that get a place of their key right now.
-- One whose key is taken becomes blocked and is passed over: it holds nobody up, not even its own group. One row more than p_quota is
-- returned, whose key is not looked at: where the lane goes on.
-- Locks: lanes of #keys, whose domain the caller holds, too; tasks, the rows that become blocked.
-- Cost: tasks_overflow_idx from the cursors, p_quota rows and those that become blocked; each of those once until its key is freed.
create function fairq._take_keys(
  p_tick fairq.ticks,
  p_group_key text,
  p_cursors fairq.cursor[],
  p_weight double precision,
  p_pace fairq.pace,
  p_quota integer,
  p_now timestamptz
) returns table (ctid tid, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint)
language plpgsql
volatile
rows 10
set search_path = ''
as $$
declare
  v_cursor fairq.cursor;
  v_task record;
  v_found integer := 0;
  v_blocked tid[] := array[]::tid[];
begin
  foreach v_cursor in array p_cursors loop
    for v_task in
      select t.ctid, t.priority, t.sequence, t.kind, t.cost, t.concurrency_key, t.expires_at is not null and t.expires_at <= p_now as is_expired
      from fairq.tasks t
      where t.shard_no = p_tick.shard_no
        and t.queue = p_tick.queue
        and t.group_key = p_group_key
        and t.state = 'overflow'
        and t.priority = v_cursor.priority
        and t.sequence >= v_cursor.sequence
      order by t.sequence
    loop
      if v_found < p_quota and not v_task.is_expired and v_task.concurrency_key is not null
        and not fairq._take_place(p_tick.shard_no, '#keys', v_task.concurrency_key, p_now)
      then
        v_blocked := v_blocked || v_task.ctid;
        continue;
      end if;
      v_found := v_found + 1;
      ctid := v_task.ctid;
      priority := v_task.priority;
      sequence := v_task.sequence;
      is_expired := v_task.is_expired;
      charge := case when p_pace is distinct from null then fairq._expected(p_pace, v_task.kind, v_task.cost) end;
      step := case when v_task.is_expired then 0 else fairq._step(coalesce(charge, v_task.cost), p_weight) end;
      return next;
      exit when v_found > p_quota;
    end loop;
    exit when v_found > p_quota;
  end loop;
  perform fairq._block(p_tick.shard_no, v_blocked);
end;
$$;
comment on function fairq._take_keys(fairq.ticks, text, fairq.cursor[], double precision, fairq.pace, integer, timestamptz) is
  'The next tasks of a lane whose tasks have concurrency keys.';

-- sql/functions/_take_place.sql

-- Takes one place of a concurrency key, or of a meter, if there is one. A key nobody used yet has no lane: its policy is looked up then.
-- Returns false when there is none.
-- Locks: lanes, one row replaced; the caller holds the domain of p_queue.
create function fairq._take_place(p_shard_no integer, p_queue text, p_group_key text, p_now timestamptz, p_places integer default 1)
returns boolean
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_lane fairq.lanes := fairq._lane(p_shard_no, p_queue, p_group_key);
begin
  if v_lane.policy is null then
    select fairq._policy(q, g) into v_lane.policy
    from fairq.queues q
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = q.queue and g.group_key = p_group_key
    where q.queue = p_queue;
  end if;
  if v_lane.policy is null then
    return true;
  end if;
  if (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks < p_places then
    return false;
  end if;

  insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, policy, gate, cursors, admissible)
  values (p_shard_no, p_queue, p_group_key, coalesce(v_lane.version, 0) + 1, coalesce(v_lane.lane_no, 0), 0, 0, 1, v_lane.policy,
    fairq._charge(v_lane.policy, v_lane.gate, p_places, p_now), '{}', false);
  delete from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue
    and l.group_key = p_group_key
    and l.version = v_lane.version;
  return true;
end;
$$;
comment on function fairq._take_place(integer, text, text, timestamptz, integer) is 'Takes places of a key or meter; false: there is none.';

-- sql/functions/_tell_watchers.sql

-- Announces the ends of those of these tasks that somebody watches; where nobody does, no NOTIFY, which takes a database-wide lock at commit.
-- The callers have settings of their own for their plans; this one has its own, too.
-- Cost: the watches that have not run out, never those behind them.
create function fairq._tell_watchers(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = on
as $$
declare
  v_watched bigint[];
begin
  select array_agg(distinct w.task_id) into v_watched
  from fairq.watches w
  where w.shard_no = p_shard_no
    and w.until > p_now
    and w.task_id = any(p_ids);
  if v_watched is not null then
    -- A notice has its limits: of many it names none, and everybody looks.
    perform pg_notify('fairq_done', case when cardinality(v_watched) <= 200 then array_to_string(v_watched, ',') else '' end);
  end if;
end;
$$;
comment on function fairq._tell_watchers(integer, bigint[], timestamptz) is 'Announces the ends of tasks that somebody watches.';

-- sql/functions/_tick.sql

-- The newest tick of a domain; nothing when there is none, or when it was written in another life of the database.
-- A restored dump keeps written_by but gets new row headers, so xmin tells; the stored horizon means nothing then.
-- Cost: one entry of ticks_pkey, read backwards, however many dead ticks lie before it.
create function fairq._tick(p_shard_no integer, p_queue text) returns setof fairq.ticks
language sql
stable
as $$
  select n.shard_no, n.written_by, n.tick, n.created_at, n.clock, n.clock_position, n.newcomer_position, n.top, n.horizon, n.horizon_position,
    n.refill_block, n.refill_position,
    n.next_xid, n.heard_xid, n.heard_ring, n.next_due_at, n.lane_count, n.filled, n.keyed, n.queue, n.pending
  from (
    select t.*, t.xmin as row_xmin
    from fairq.ticks t
    where t.shard_no = p_shard_no
      and t.queue = p_queue
    order by t.tick desc
    limit 1
  ) n
  where n.row_xmin = n.written_by
$$;
comment on function fairq._tick(integer, text) is 'The newest tick of a domain, if it can be trusted.';

-- sql/functions/_touch_worker.sql

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

-- sql/functions/_unblock.sql

-- Keys that have places again: per key and group, as many blocked tasks as there are places go back to overflow and ring. They take their key when their
-- turn comes; whoever comes first gets it, the others become blocked again. Per group, because the first of one group may have to wait for
-- reasons of its own while the key is free for others.
-- Locks: tasks, blocked rows, which change only under the lock of #keys, which the caller holds.
-- Cost: tasks_blocked_idx, one step per group that waits for the key.
create function fairq._unblock(p_shard_no integer, p_lanes fairq.lanes[], p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
begin
  with recursive key as (
    select l.group_key as concurrency_key, (fairq._allowance(l.policy, l.gate, p_now)).tasks as places
    from unnest(p_lanes) l
  ),
  -- A loose walk: the next group that waits for the key after the one before.
  waiting as (
    select k.concurrency_key, k.places, f.queue, f.group_key
    from key k
    cross join lateral (
      select t.queue, t.group_key
      from fairq.tasks t
      where t.shard_no = p_shard_no
        and t.state = 'blocked'
        and t.concurrency_key = k.concurrency_key
      order by t.queue, t.group_key
      limit 1
    ) f
    where k.places > 0
    union all
    select w.concurrency_key, w.places, f.queue, f.group_key
    from waiting w
    cross join lateral (
      select t.queue, t.group_key
      from fairq.tasks t
      where t.shard_no = p_shard_no
        and t.state = 'blocked'
        and t.concurrency_key = w.concurrency_key
        and (t.queue, t.group_key) > (w.queue, w.group_key)
      order by t.queue, t.group_key
      limit 1
    ) f
  )
  select array_agg(n.ctid) into v_ctids
  from waiting w
  cross join lateral (
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.state = 'blocked'
      and t.concurrency_key = w.concurrency_key
      and t.queue = w.queue
      and t.group_key = w.group_key
    order by t.priority desc, t.sequence
    limit w.places
  ) n;
  if v_ctids is not null then
    perform fairq._line_up(p_shard_no, v_ctids);
  end if;
end;
$$;
comment on function fairq._unblock(integer, fairq.lanes[], timestamptz) is 'Puts tasks whose concurrency key has a place again back in line.';

-- sql/functions/_unplace.sql

-- Takes queued tasks, which the caller has locked, out of the order: queued -> overflow. Their concurrency keys are free; the
-- places of their group the caller gives back itself. By ctid and no other way, see _hold.
create function fairq._unplace(p_shard_no integer, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  with unplaced as (
    update fairq.tasks t
    set state = 'overflow', block = null, position = null, counted = false
    where t.shard_no = p_shard_no
      and t.ctid = any(p_ctids)
    returning t.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, freed)
  select p_shard_no, '#keys', u.concurrency_key, count(*)
  from unplaced u
  where u.concurrency_key is not null
  group by u.concurrency_key;
end;
$$;
comment on function fairq._unplace(integer, tid[]) is 'Takes queued tasks out of the order.';

-- sql/functions/_wake.sql

-- Scheduled tasks become overflow, in the order given, behind what their groups have waiting, and ring. By ctid and no other way, see _hold.
-- Locks: tasks, the rows named; the caller holds the domain.
create function fairq._wake(p_shard_no integer, p_queue text, p_ctids tid[]) returns void
language plpgsql
volatile
set search_path = ''
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = off
as $$
begin
  with numbered as materialized (
    select d.ctid, nextval('fairq.task_ids') as sequence from unnest(p_ctids) d(ctid)
  ),
  woken as (
    update fairq.tasks t
    set state = 'overflow', sequence = n.sequence
    from numbered n
    where t.shard_no = p_shard_no
      and t.ctid = n.ctid
    returning t.group_key, t.priority, t.sequence, t.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  select p_shard_no, p_queue, w.group_key, w.priority, min(w.sequence), bool_or(w.concurrency_key is not null)
  from woken w
  group by w.group_key, w.priority;
end;
$$;
comment on function fairq._wake(integer, text, tid[]) is 'Moves scheduled tasks to overflow.';

-- sql/functions/_wake_due.sql

-- Lanes that a rate or a breaker held back until now ring. Scheduled tasks that are due become overflow, behind what their groups have waiting, and ring: the promotion that calls this hears
-- the rings of its own transaction.
-- Locks: tasks, the scheduled rows it moves, "skip locked": retry_task in somebody's open transaction may hold one, and is not waited for.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_ctids tid[];
begin
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no
    and l.queue = p_tick.queue
    and l.look_at >= p_tick.next_due_at
    and l.look_at <= p_now
  order by l.look_at
  limit p_limit;

  select array_agg(d.ctid) into v_ctids
  from (
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.state = 'scheduled'
      and t.run_at >= p_tick.next_due_at
      and t.run_at <= p_now
    order by t.run_at
    limit p_limit
    for update skip locked
  ) d;
  if v_ctids is not null then
    perform fairq._wake(p_tick.shard_no, p_tick.queue, v_ctids);
  end if;
end;
$$;
comment on function fairq._wake_due(fairq.ticks, timestamptz, integer) is 'Moves due scheduled tasks to overflow.';

-- sql/functions/_write_tick.sql

-- Appends a tick. Inside a savepoint the row's xmin is the subtransaction's, which only the row itself can tell:
-- then written_by is corrected at once, or the next reader would take the tick for a restored one. ("returning xmin" would be shorter, and fails
-- where the table is partitioned.)
create function fairq._write_tick(p_tick fairq.ticks) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  insert into fairq.ticks as t (shard_no, queue, tick, created_at, clock, clock_position, newcomer_position, top, horizon, horizon_position,
    refill_block, refill_position,
    next_xid, pending, heard_xid, heard_ring, next_due_at, lane_count, filled, keyed)
  values (p_tick.shard_no, p_tick.queue, p_tick.tick, p_tick.created_at, p_tick.clock, p_tick.clock_position, p_tick.newcomer_position, p_tick.top,
    p_tick.horizon, p_tick.horizon_position, p_tick.refill_block, p_tick.refill_position, p_tick.next_xid, p_tick.pending, p_tick.heard_xid,
    p_tick.heard_ring, p_tick.next_due_at, p_tick.lane_count, p_tick.filled, p_tick.keyed);

  update fairq.ticks t
  set written_by = t.xmin
  where t.shard_no = p_tick.shard_no
    and t.queue = p_tick.queue
    and t.tick = p_tick.tick
    and t.written_by <> t.xmin;
end;
$$;
comment on function fairq._write_tick(fairq.ticks) is 'Appends a tick.';

-- sql/functions/cancel_task.sql

-- Wishes to cancel a task, in the caller's transaction: two inserts, nothing is locked. When the transaction commits, a waiting task ends as
-- cancelled at the next promotion, which the next pop makes; a running one is told by its worker's heartbeat.
-- Returns true when the task was live.
create function fairq.cancel_task(p_id bigint) returns boolean
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_task record;
begin
  select t.shard_no, t.queue, t.group_key into v_task
  from fairq._shards(null) s(shard_no)
  cross join lateral (select k.shard_no, k.queue, k.group_key from fairq.tasks k where k.shard_no = s.shard_no and k.id = p_id offset 0) t;
  if not found then
    return false;
  end if;
  insert into fairq.cancellations (shard_no, task_id, requested_at) values (v_task.shard_no, p_id, fairq._now());
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id) values (v_task.shard_no, v_task.queue, v_task.group_key, p_id);
  return true;
end;
$$;
comment on function fairq.cancel_task(bigint) is 'Cancels a task when the transaction commits. False: it is not live.';

-- sql/functions/configure_cluster.sql

-- Changes settings of the installation; null leaves one as it is.
-- p_max_running caps the tasks in flight over all queues and workers; it is kept in fairq.groups, queue '#meters'. It excludes claim leases (QF015 at pop).
-- The number of shards can change only while there are no tasks: it decides where a task is stored.
-- Raises QF013 when there are tasks, QF007 bad number, QF014 an unknown name in p_reset.
-- Locks: settings; #meters and held tasks when the cap changes.
create function fairq.configure_cluster(
  p_shard_count integer default null,
  p_payload_limit integer default null,
  p_max_running integer default null,
  p_reset text[] default '{}'
) returns fairq.settings
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_settings fairq.settings;
begin
  if p_shard_count not between 1 and 4096 or p_payload_limit not between 1 and 268435456 then
    raise exception 'shard count % or payload limit % is out of range', coalesce(p_shard_count::text, 'not given'), coalesce(p_payload_limit::text, 'not given')
      using errcode = 'QF007', hint = 'Shards: 1 to 4096. Payload limit: 1 byte to 256 MiB.';
  end if;
  perform fairq._check_policy('the cluster', null, p_max_running, null, null, null, null, null);
  perform fairq._check_reset('the cluster', p_reset, array['max_running']);
  select s.* into v_settings from fairq.settings s for update;
  if p_shard_count <> v_settings.shard_count then
    lock table fairq.tasks in share row exclusive mode;
    if exists (select from fairq.tasks) or exists (select from fairq.finished_tasks) or exists (select from fairq.workers) then
      raise exception 'the number of shards cannot change from % to % while there are tasks or workers', v_settings.shard_count, p_shard_count
        using errcode = 'QF013', hint = 'It decides where a task is stored. Install a second schema or database with the new number and let this one run empty.';
    end if;
    delete from fairq.domains d where d.shard_no >= p_shard_count;
    delete from fairq.maintenance m where m.shard_no >= p_shard_count;
    insert into fairq.domains (shard_no, queue)
    select s.shard_no, q.queue from generate_series(0, p_shard_count - 1) s(shard_no) cross join fairq.queues q
    on conflict do nothing;
    insert into fairq.maintenance (shard_no)
    select s.shard_no from generate_series(0, p_shard_count - 1) s(shard_no)
    on conflict do nothing;
  end if;

  update fairq.settings s
  set shard_count = coalesce(p_shard_count, s.shard_count), payload_limit = coalesce(p_payload_limit, s.payload_limit)
  returning s.* into v_settings;
  if p_max_running is not null or p_reset && array['max_running'] then
    perform fairq._configure_meter('cluster', null, p_max_running, null, null, null, null, null, p_reset);
  end if;
  return v_settings;
end;
$$;
comment on function fairq.configure_cluster(integer, integer, integer, text[]) is 'Changes settings of the installation; null leaves one as it is.';

-- sql/functions/configure_group.sql

-- Settings of one group of a queue; null leaves one as it is, a name in p_reset takes the queue's default again. Takes effect with the next promotion,
-- which the next pop makes. Groups need no settings: unknown ones have those of their queue.
-- A first cap or breaker counts the tasks that are in flight already.
-- Returns the settings in force.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED, QF007 a number out of range, QF009 a time, QF014 an unknown name in p_reset.
-- Locks: the domain, waits for it; groups, one row; tasks in flight of the group.
create function fairq.configure_group(
  p_queue text,
  p_group_key text,
  p_weight double precision default null,
  p_max_running integer default null,
  p_rate_limit integer default null,
  p_rate_period interval default null,
  p_rate_burst integer default null,
  p_breaker_threshold integer default null,
  p_breaker_cooldown interval default null,
  p_reset text[] default '{}'
) returns fairq.groups
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_group fairq.groups;
  v_shard_no integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  perform fairq._check_reset(format('group "%s"', p_group_key), p_reset, array['weight', 'max_running', 'rate', 'breaker']);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  -- The lane first hears all there is to hear under the old settings, so that what is counted below is counted once.
  perform fairq._promote(v_shard_no, p_queue, 1, true);
  v_group := fairq._set_limits(v_shard_no, p_queue, p_group_key, p_weight, p_max_running, p_rate_limit, p_rate_period, p_rate_burst,
    p_breaker_threshold, p_breaker_cooldown, p_reset);
  perform fairq._adopt(v_shard_no, q, p_group_key) from fairq.queues q where q.queue = p_queue;
  perform fairq._promote(v_shard_no, p_queue, 1, true);
  return v_group;
end;
$$;
comment on function fairq.configure_group(text, text, double precision, integer, integer, interval, integer, integer, interval, text[]) is
  'Changes settings of one group; null leaves one as it is.';

-- sql/functions/configure_key.sql

-- How many tasks with a concurrency key may be in flight at once, over all queues and groups of a shard. Keys need no settings: an unknown one has one place.
-- Returns the settings in force.
-- Raises QF006 key, QF005 not READ COMMITTED, QF007 a number out of range, QF014 an unknown name in p_reset.
-- Locks: the domain #keys, waits for it; groups, one row.
create function fairq.configure_key(p_concurrency_key text, p_max_running integer default null, p_reset text[] default '{}') returns fairq.groups
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_shard_no integer;
  v_key fairq.groups;
begin
  if p_concurrency_key is null or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500 then
    raise exception 'a concurrency key has 1 to 500 bytes' using errcode = 'QF006', hint = 'Name the resource that tasks share.';
  end if;
  perform fairq._check_reset(format('concurrency key "%s"', p_concurrency_key), p_reset, array['max_running']);
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform fairq._promote(v_shard_no, '#keys', 1, true);
    v_key := fairq._set_limits(v_shard_no, '#keys', p_concurrency_key, null, p_max_running, null, null, null, null, null, p_reset);
    -- Hears the ring: what a higher cap lets in is unblocked now.
    perform fairq._promote(v_shard_no, '#keys', 1, true);
  end loop;
  return v_key;
end;
$$;
comment on function fairq.configure_key(text, integer, text[]) is 'Changes how many tasks with a concurrency key may be in flight.';

-- sql/functions/configure_queue.sql

-- Creates a queue, or changes its settings; null leaves one as it is, a name in p_reset removes it: ready_target; group_max_running, group_rate, group_breaker
-- (defaults of its groups); max_running, rate, breaker (limits of the queue as a whole). Takes effect with the next promotion and pop.
-- Returns the settings in force; the limits of the whole queue are in fairq.groups, queue '#meters'.
-- Raises QF005 not READ COMMITTED, QF006 bad name, QF007 bad number, QF009 bad interval, QF014 an unknown name in p_reset or p_fairness.
-- Locks: queues, one row; where limits change, the domains of the queue, or #meters, and tasks in flight.
create function fairq.configure_queue(
  p_queue text,
  p_ready_target integer default null,
  p_max_attempts integer default null,
  p_retry_base interval default null,
  p_retry_cap interval default null,
  p_retention interval default null,
  p_notify boolean default null,
  p_weight double precision default null,
  p_fairness text default null,
  p_group_max_running integer default null,
  p_group_rate_limit integer default null,
  p_group_rate_period interval default null,
  p_group_rate_burst integer default null,
  p_group_breaker_threshold integer default null,
  p_group_breaker_cooldown interval default null,
  p_max_running integer default null,
  p_rate_limit integer default null,
  p_rate_period interval default null,
  p_rate_burst integer default null,
  p_breaker_threshold integer default null,
  p_breaker_cooldown interval default null,
  p_reset text[] default '{}'
) returns fairq.queues
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_queue fairq.queues;
  v_shard_no integer;
  v_is_new boolean;
  v_groups_change boolean := num_nonnulls(p_weight, p_fairness, p_group_max_running, p_group_rate_limit, p_group_rate_period, p_group_rate_burst,
    p_group_breaker_threshold, p_group_breaker_cooldown) > 0 or p_reset && array['weight', 'group_max_running', 'group_rate', 'group_breaker'];
  v_meter_changes boolean := num_nonnulls(p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold, p_breaker_cooldown) > 0
    or p_reset && array['max_running', 'rate', 'breaker'];
begin
  -- No names: "not 'x' = any(null)" would be null, and take the setting away.
  p_reset := coalesce(p_reset, '{}');
  if p_queue is null or p_queue = '' or octet_length(p_queue) > 200 or p_queue like '#%' then
    raise exception 'the name of a queue has 1 to 200 bytes and does not begin with #' using errcode = 'QF006', hint = 'For example: documents.';
  end if;
  if p_ready_target not between 1 and 1000000 or p_max_attempts not between 1 and 1000000 then
    raise exception 'a setting of queue "%" is out of range: ready target %, max attempts %', p_queue, coalesce(p_ready_target::text, 'not given'),
      coalesce(p_max_attempts::text, 'not given')
      using errcode = 'QF007', hint = 'Both are 1 to 1000000.';
  end if;
  -- A time that cannot be taken from today, or added to it, would fail every later maintain() and finish.
  if not fairq._is_span(p_retry_base, '366 days') or not fairq._is_span(p_retry_cap, '366 days') or not fairq._is_span(p_retention, '36525 days') then
    raise exception 'a time of queue "%" is out of range: retry base %, retry cap %, retention %', p_queue, coalesce(p_retry_base::text, 'not given'),
      coalesce(p_retry_cap::text, 'not given'), coalesce(p_retention::text, 'not given')
      using errcode = 'QF009', hint = 'Zero or more; a back-off at most 366 days, the retention at most 36525.';
  end if;
  if p_fairness not in ('count', 'time') then
    raise exception 'groups of queue "%" cannot share by %', p_queue, p_fairness
      using errcode = 'QF014', hint = 'p_fairness is count (as many tasks for each) or time (as many worker seconds).';
  end if;
  perform fairq._check_policy(p_queue, p_weight, p_group_max_running, p_group_rate_limit, p_group_rate_period, p_group_rate_burst,
    p_group_breaker_threshold, p_group_breaker_cooldown);
  perform fairq._check_policy(p_queue, null, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold, p_breaker_cooldown);
  perform fairq._check_reset(format('queue "%s"', p_queue), p_reset, array['ready_target', 'weight', 'group_max_running', 'group_rate',
    'group_breaker', 'max_running', 'rate', 'breaker']);

  if p_group_rate_period is not null and p_group_rate_limit is null and ('group_rate' = any(p_reset) or not exists (
      select from fairq.queues q where q.queue = p_queue and q.group_rate_limit is not null))
    or p_group_breaker_cooldown is not null and p_group_breaker_threshold is null and ('group_breaker' = any(p_reset) or not exists (
      select from fairq.queues q where q.queue = p_queue and q.group_breaker_threshold is not null))
  then
    raise exception 'a rate period or a breaker cooldown alone says nothing: groups of queue "%"', p_queue
      using errcode = 'QF007', hint = 'Set the rate limit or the breaker threshold with it.';
  end if;

  insert into fairq.queues (queue) values (p_queue) on conflict do nothing;
  v_is_new := found;
  insert into fairq.domains (shard_no, queue)
  select s.shard_no, p_queue from fairq._shards(null) s(shard_no)
  on conflict do nothing;
  if v_groups_change and not v_is_new then
    -- Every lane first hears all there is to hear under the old settings; see configure_group.
    perform fairq._promote(s.shard_no, p_queue, 1, true) from fairq._shards(null) s(shard_no);
  end if;

  update fairq.queues q
  set ready_target = case when not 'ready_target' = any(p_reset) then coalesce(p_ready_target, q.ready_target) end,
    max_attempts = coalesce(p_max_attempts, q.max_attempts),
    retry_base = coalesce(p_retry_base, q.retry_base),
    retry_cap = coalesce(p_retry_cap, q.retry_cap),
    retention = coalesce(p_retention, q.retention),
    notify = coalesce(p_notify, q.notify),
    fairness = coalesce(p_fairness, q.fairness),
    weight = coalesce(p_weight, case when 'weight' = any(p_reset) then 1 else q.weight end),
    group_max_running = coalesce(p_group_max_running, case when not 'group_max_running' = any(p_reset) then q.group_max_running end),
    group_rate_limit = coalesce(p_group_rate_limit, case when not 'group_rate' = any(p_reset) then q.group_rate_limit end),
    group_rate_period = coalesce(p_group_rate_period, case when not 'group_rate' = any(p_reset) then q.group_rate_period end,
      case when p_group_rate_limit is not null then interval '1 second' end),
    group_rate_burst = coalesce(p_group_rate_burst, case when not 'group_rate' = any(p_reset) then q.group_rate_burst end),
    group_breaker_threshold = coalesce(p_group_breaker_threshold, case when not 'group_breaker' = any(p_reset) then q.group_breaker_threshold end),
    group_breaker_cooldown = coalesce(p_group_breaker_cooldown, case when not 'group_breaker' = any(p_reset) then q.group_breaker_cooldown end,
      case when p_group_breaker_threshold is not null then interval '1 minute' end)
  where q.queue = p_queue
  returning q.* into v_queue;

  if v_groups_change and not v_is_new then
    for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
      perform fairq._adopt(v_shard_no, v_queue, null);
      -- The groups that have a lane look their settings up again; others will when they get one.
      insert into fairq.rings (shard_no, queue, group_key)
      select distinct l.shard_no, l.queue, l.group_key
      from fairq.lanes l
      where l.shard_no = v_shard_no
        and l.queue = p_queue;
    end loop;
  end if;
  if v_meter_changes then
    perform fairq._configure_meter('queue ' || p_queue, p_queue, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold,
      p_breaker_cooldown, p_reset);
  elsif v_is_new then
    update fairq.queues q
    set metered = exists (
      select
      from fairq.groups g
      where g.shard_no = 0
        and g.queue = '#meters'
        and g.group_key = 'cluster'
        and coalesce(g.max_running, g.rate_limit, g.breaker_threshold) is not null
    )
    where q.queue = p_queue;
  end if;
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.notify and (v_groups_change or v_meter_changes) then
    perform pg_notify('fairq', p_queue);
  end if;
  return v_queue;
end;
$$;
comment on function fairq.configure_queue(text, integer, integer, interval, interval, interval, boolean, double precision, text, integer, integer, interval, integer, integer, interval, integer, integer, interval, integer, integer, interval, text[]) is
  'Creates a queue, or changes its settings; null leaves one as it is.';

-- sql/functions/create_task.sql

-- Creates a task in the caller's transaction. Two inserts, the task and its ring: nothing shared is locked, updated or waited for, in any
-- isolation level (I2); only equal idempotency keys wait for each other.
-- p_promote assigns the block address at once. That takes the domain's lock until the transaction ends: for a transaction that ends here.
-- Returns the id of the task; with a known idempotency key, the id of the task that has it.
-- Raises QF001 to QF010 (see _check_task), QF003 unknown queue, QF005 p_promote outside READ COMMITTED, QF016 the queue is draining (a known
-- idempotency key is answered all the same).
create function fairq.create_task(
  p_group_key text,
  p_payload jsonb,
  p_queue text default 'default',
  p_kind text default 'default',
  p_priority integer default 0,
  p_run_at timestamptz default null,
  p_expires_at timestamptz default null,
  p_max_attempts integer default null,
  p_cost double precision default 1,
  p_timeout interval default null,
  p_idempotency_key text default null,
  p_concurrency_key text default null,
  p_headers jsonb default null,
  p_promote boolean default false
) returns bigint
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_settings record;
  v_shard_no integer;
  v_id bigint;
  v_known_id bigint;
  v_scheduled boolean := coalesce(p_run_at > v_now, false);
  v_announce boolean := false;
begin
  select s.shard_count, s.payload_limit, q.max_attempts, q.notify, q.draining_at into v_settings
  from fairq.settings s
  cross join fairq.queues q
  where q.queue = p_queue
    and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  perform fairq._check_task(p_group_key, p_payload, v_settings.payload_limit, p_kind, p_priority, p_run_at, p_expires_at, p_max_attempts,
    p_cost, p_timeout, p_idempotency_key, p_concurrency_key);

  v_shard_no := fairq._shard_of(p_group_key, v_settings.shard_count);
  v_id := nextval('fairq.task_ids');
  if p_idempotency_key is not null then
    v_known_id := fairq._claim_idempotency_key(v_shard_no, p_queue, p_group_key, p_idempotency_key, p_kind, p_payload, v_id);
    if v_known_id is not null then
      return v_known_id;
    end if;
  end if;
  if v_settings.draining_at is not null then
    perform fairq._refuse_draining(p_queue);
  end if;

  if v_settings.notify then
    select not a.is_announced into v_announce from fairq._announced(v_shard_no, p_queue) a;
  end if;

  insert into fairq.tasks (shard_no, id, sequence, queue, group_key, kind, state, priority, created_at, run_at, expires_at, cost,
    max_attempts, timeout, idempotency_key, concurrency_key, headers, payload)
  values (v_shard_no, v_id, v_id, p_queue, p_group_key, p_kind, case when v_scheduled then 'scheduled' else 'overflow' end, p_priority,
    v_now, coalesce(p_run_at, v_now), p_expires_at, p_cost, coalesce(p_max_attempts, v_settings.max_attempts), p_timeout,
    p_idempotency_key, p_concurrency_key, p_headers, p_payload);

  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, due_at, keyed, announced)
  values (v_shard_no, p_queue, p_group_key, case when not v_scheduled then p_priority end, case when not v_scheduled then v_id end,
    case when v_scheduled then p_run_at end, p_concurrency_key is not null, v_announce);

  if p_promote then
    perform fairq._promote(v_shard_no, p_queue, 1000, true);
  end if;
  -- Also for a scheduled task: a worker that sleeps learns when to wake up.
  if v_announce then
    perform pg_notify('fairq', p_queue);
  end if;
  return v_id;
end;
$$;
comment on function fairq.create_task(text, jsonb, text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text, jsonb, boolean) is
  'Creates a task in the caller''s transaction, without waiting for anyone. Returns its id.';

-- sql/functions/create_tasks.sql

-- Creates many tasks with one call; each array has one element per task, the other options hold for all of them.
-- One ring per group and priority, not per task.
-- Returns the ids in the order of the input.
-- Raises what create_task raises, and QF011 when the arrays differ in length. Nothing is created then.
create function fairq.create_tasks(
  p_group_keys text[],
  p_payloads jsonb[],
  p_queue text default 'default',
  p_kind text default 'default',
  p_priority integer default 0,
  p_run_at timestamptz default null,
  p_expires_at timestamptz default null,
  p_max_attempts integer default null,
  p_cost double precision default 1,
  p_timeout interval default null,
  p_idempotency_keys text[] default null,
  p_concurrency_keys text[] default null,
  p_headers jsonb default null,
  p_priorities integer[] default null,
  p_costs double precision[] default null,
  p_promote boolean default false
) returns setof bigint
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_settings record;
  v_count integer := coalesce(cardinality(p_group_keys), 0);
  v_wrong record;
  v_shard_no integer;
  v_announce boolean;
begin
  select s.shard_count, s.payload_limit, q.max_attempts, q.notify, q.draining_at into v_settings
  from fairq.settings s
  cross join fairq.queues q
  where q.queue = p_queue
    and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  -- With idempotency keys, create_task judges each: those it knows are no new tasks.
  if v_settings.draining_at is not null and p_idempotency_keys is null then
    perform fairq._refuse_draining(p_queue);
  end if;
  if coalesce(cardinality(p_payloads), 0) <> v_count
    or coalesce(cardinality(p_idempotency_keys), v_count) <> v_count
    or coalesce(cardinality(p_concurrency_keys), v_count) <> v_count
    or coalesce(cardinality(p_priorities), v_count) <> v_count
    or coalesce(cardinality(p_costs), v_count) <> v_count
  then
    raise exception 'the arrays have different lengths: % group keys, % payloads', v_count, coalesce(cardinality(p_payloads), 0)
      using errcode = 'QF011', hint = 'Every array has one element per task, or is null.';
  end if;

  -- Over several shards no single ring says whether a NOTIFY is on its way: then one is sent in any case.
  v_announce := v_settings.notify and v_count > 0;
  if v_announce and v_settings.shard_count = 1 then
    select not a.is_announced into v_announce from fairq._announced(0, p_queue) a;
  end if;

  -- The first task is always looked at, for what holds for all; the others only when one scan finds something odd about them.
  for v_wrong in
    select i.*
    from unnest(p_group_keys, p_payloads, p_idempotency_keys, p_concurrency_keys, p_priorities, p_costs)
      with ordinality i(group_key, payload, idempotency_key, concurrency_key, priority, cost, ordinal)
    where i.ordinal = 1
      or i.group_key is null
      or i.group_key = ''
      or octet_length(i.group_key) > 500
      or i.payload is null
      or pg_column_size(i.payload) > v_settings.payload_limit / 4
      or i.idempotency_key = ''
      or octet_length(i.idempotency_key) > 500
      or i.concurrency_key = ''
      or octet_length(i.concurrency_key) > 500
      or coalesce(i.priority, p_priority) is null
      or coalesce(i.priority, p_priority) not between -1000000 and 1000000
      or coalesce(i.cost, p_cost) is null
      or coalesce(i.cost, p_cost) not between 0.001 and 1000000
  loop
    perform fairq._check_task(v_wrong.group_key, v_wrong.payload, v_settings.payload_limit, p_kind, coalesce(v_wrong.priority, p_priority),
      p_run_at, p_expires_at, p_max_attempts, coalesce(v_wrong.cost, p_cost), p_timeout, v_wrong.idempotency_key, v_wrong.concurrency_key);
  end loop;

  -- Keys are taken one by one in a fixed order, so two calls with the same keys wait for each other and do not deadlock.
  if p_idempotency_keys is not null then
    return query
      with created as materialized (
        select k.ordinal, fairq.create_task(k.group_key, k.payload, p_queue, p_kind, coalesce(k.priority, p_priority), p_run_at, p_expires_at,
          p_max_attempts, coalesce(k.cost, p_cost), p_timeout, k.idempotency_key, k.concurrency_key, p_headers) as id
        from (
          select i.*
          from unnest(p_group_keys, p_payloads, p_idempotency_keys, p_concurrency_keys, p_priorities, p_costs)
            with ordinality i(group_key, payload, idempotency_key, concurrency_key, priority, cost, ordinal)
          order by i.idempotency_key, i.group_key, i.ordinal
        ) k
      )
      select c.id from created c order by c.ordinal;
  else
    return query
      with input as materialized (
        select i.*, coalesce(i.priority, p_priority) as task_priority, nextval('fairq.task_ids') as id,
          fairq._shard_of(i.group_key, v_settings.shard_count) as shard_no
        from unnest(p_group_keys, p_payloads, p_concurrency_keys, p_priorities, p_costs)
          with ordinality i(group_key, payload, concurrency_key, priority, cost, ordinal)
      ),
      created as (
        insert into fairq.tasks (shard_no, id, sequence, queue, group_key, kind, state, priority, created_at, run_at, expires_at, cost,
          max_attempts, timeout, concurrency_key, headers, payload)
        select i.shard_no, i.id, i.id, p_queue, i.group_key, p_kind, case when p_run_at > v_now then 'scheduled' else 'overflow' end,
          i.task_priority, v_now, coalesce(p_run_at, v_now), p_expires_at, coalesce(i.cost, p_cost),
          coalesce(p_max_attempts, v_settings.max_attempts), p_timeout, i.concurrency_key, p_headers, i.payload
        from input i
      ),
      rung as (
        insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed, announced)
        select i.shard_no, p_queue, i.group_key, i.task_priority, min(i.id), bool_or(i.concurrency_key is not null),
          v_announce and bool_or(i.ordinal = 1)
        from input i
        where p_run_at is null or p_run_at <= v_now
        group by i.shard_no, i.group_key, i.task_priority
      ),
      announced as (
        insert into fairq.rings (shard_no, queue, group_key, due_at, announced)
        select i.shard_no, p_queue, min(i.group_key), p_run_at, v_announce and bool_or(i.ordinal = 1)
        from input i
        where p_run_at > v_now
        group by i.shard_no
      )
      select i.id from input i order by i.ordinal;
  end if;

  if p_promote then
    for v_shard_no in
      select distinct fairq._shard_of(g.group_key, v_settings.shard_count) from unnest(p_group_keys) g(group_key) order by 1
    loop
      perform fairq._promote(v_shard_no, p_queue, 1000, true);
    end loop;
  end if;
  if v_announce then
    perform pg_notify('fairq', p_queue);
  end if;
end;
$$;
comment on function fairq.create_tasks(text[], jsonb[], text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text[], text[], jsonb, integer[], double precision[], boolean) is
  'Creates many tasks with one call. Returns their ids in the order of the input.';

-- sql/functions/drain_queue.sql

-- Lets a queue run empty: new tasks are refused (QF016) until it is resumed, what is there is served to the end, retries and schedules included. Costs the
-- same however much that is. Whether it is empty fairq.queue_stats tells. A transaction that created tasks before this one committed is let through.
-- Raises QF003 unknown queue.
-- Locks: queues, one row.
create function fairq.drain_queue(p_queue text) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  update fairq.queues q set draining_at = coalesce(q.draining_at, fairq._now()) where q.queue = p_queue and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
end;
$$;
comment on function fairq.drain_queue(text) is 'Refuses new tasks of a queue and serves those that are there, until it is resumed.';

-- sql/functions/explain_task.sql

-- Why a task is not running, and what stands before it: one row, also for a task that ended; none for an unknown id.
-- ahead counts the tasks served before it as things stand: for a queued task those queued before it, for one in overflow those of its own
-- group plus, for each other group, the rounds until then are not guessed: ahead_in_group is exact, ahead is null.
create function fairq.explain_task(p_id bigint)
returns table (
  task_id bigint,
  state text,
  reason text,
  ahead_in_group bigint,
  ahead bigint,
  next_look_at timestamptz,
  worker_id bigint,
  attempt integer,
  max_attempts integer
)
language plpgsql
volatile
rows 1
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_task record;
  v_workers bigint;
begin
  select t.* into v_task
  from fairq._shards(null) s(shard_no)
  cross join lateral (
    select k.shard_no, k.id, k.queue, k.group_key, k.state, k.priority, k.sequence, k.block, k.position, k.run_at, k.expires_at,
      k.worker_id, k.attempt, k.max_attempts, k.concurrency_key
    from fairq.tasks k
    where k.shard_no = s.shard_no
      and k.id = p_id
    offset 0
  ) t;
  if not found then
    return query
      select f.id, f.outcome, format('ended as %s at %s', f.outcome, f.finished_at), null::bigint, null::bigint, null::timestamptz,
        f.worker_id, f.attempt, f.max_attempts
      from fairq._shards(null) s(shard_no)
      join fairq.finished_tasks f on f.shard_no = s.shard_no and f.id = p_id;
    return;
  end if;

  task_id := p_id;
  state := v_task.state;
  worker_id := v_task.worker_id;
  attempt := v_task.attempt;
  max_attempts := v_task.max_attempts;
  select count(*) into v_workers
  from fairq.workers w
  where w.shard_no = v_task.shard_no
    and v_task.queue = any(w.queues);

  if v_task.state in ('overflow', 'queued') then
    select count(*) into ahead_in_group
    from fairq.tasks t
    where t.shard_no = v_task.shard_no
      and t.queue = v_task.queue
      and t.group_key = v_task.group_key
      and t.state in ('overflow', 'queued')
      and (-t.priority, t.sequence) < (-v_task.priority, v_task.sequence);
  end if;
  if v_task.state = 'queued' then
    select count(*) into ahead
    from fairq.tasks t
    where t.shard_no = v_task.shard_no
      and t.queue = v_task.queue
      and t.state = 'queued'
      and (t.block, t.position) < (v_task.block, v_task.position);
  end if;

  if v_task.state in ('scheduled', 'overflow', 'blocked', 'queued') then
    select w.reason, w.look_at into reason, next_look_at
    from fairq._obstacles(v_task.shard_no, v_task.queue, v_task.group_key, v_task.concurrency_key, v_task.state, v_now) w
    order by w.nth
    limit 1;
  end if;
  reason := case
    when v_task.worker_id is not null
      then format('%s by worker %s, attempt %s of %s', v_task.state, v_task.worker_id, v_task.attempt, v_task.max_attempts)
    when v_task.expires_at <= v_now then format('expired at %s, to be ended', v_task.expires_at)
    when v_task.state = 'scheduled' and v_task.attempt > 0
      then format('waits for its back-off until %s, attempt %s of %s', v_task.run_at, v_task.attempt + 1, v_task.max_attempts)
    when v_task.state = 'scheduled' then format('scheduled at %s', v_task.run_at)
    when reason is not null then reason
    when v_workers = 0 then format('no live worker for queue "%s"', v_task.queue)
    when v_task.state = 'queued' then format('behind %s tasks in order', ahead)
    else format('behind %s tasks of its group, waiting for promotion', ahead_in_group)
  end;
  next_look_at := case when v_task.state = 'scheduled' then v_task.run_at else next_look_at end;
  return next;
end;
$$;
comment on function fairq.explain_task(bigint) is 'Why a task is not running, and what stands before it.';

-- sql/functions/finish_tasks.sql

-- Ends attempts, as their holder saw them end, in batches. Outcomes: succeeded; failed (for good); retry (again after a back-off while
-- attempts are left, else failed); cancelled; expired. Null arrays mean: all succeeded, no result, no error, the queue's back-off.
-- Returns the ids that were accepted. A missing one was not this worker's any more, in this attempt: nothing of it was changed (I10).
-- Raises QF011 arrays of different length, QF012 unknown outcome.
-- Locks: tasks, the rows named; no row that others share.
-- Cost: one step in tasks_pkey per task.
create function fairq.finish_tasks(
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_outcomes text[] default null,
  p_results jsonb[] default null,
  p_errors jsonb[] default null,
  p_retry_delays interval[] default null,
  p_shard_no integer default null
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_count integer := coalesce(cardinality(p_ids), 0);
  v_unknown text;
  v_shard_no integer;
begin
  if coalesce(cardinality(p_attempts), 0) <> v_count
    or coalesce(cardinality(p_outcomes), v_count) <> v_count
    or coalesce(cardinality(p_results), v_count) <> v_count
    or coalesce(cardinality(p_errors), v_count) <> v_count
    or coalesce(cardinality(p_retry_delays), v_count) <> v_count
  then
    raise exception 'worker % finishes % tasks with arrays of other lengths', p_worker_id, v_count
      using errcode = 'QF011', hint = 'Every array has one element per task, or is null.';
  end if;
  if not p_outcomes <@ array['succeeded', 'failed', 'retry', 'cancelled', 'expired'] then
    select o.outcome into v_unknown
    from unnest(p_outcomes) o(outcome)
    where o.outcome is null or o.outcome not in ('succeeded', 'failed', 'retry', 'cancelled', 'expired');
    raise exception 'worker % finishes a task with the unknown outcome "%"', p_worker_id, coalesce(v_unknown, 'null')
      using errcode = 'QF012', hint = 'Outcomes are succeeded, failed, retry, cancelled, expired.';
  end if;

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    return query
      select f.* from fairq._finish(v_shard_no, p_worker_id, p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays) f;
  end loop;
end;
$$;
comment on function fairq.finish_tasks(bigint, bigint[], integer[], text[], jsonb[], jsonb[], interval[], integer) is
  'Ends attempts of a worker''s tasks. Returns the ids accepted; a stale one is missing.';

-- sql/functions/heartbeat.sql

-- A worker's sign of life.
-- Returns those of its tasks that somebody wished to cancel, until they are finished: stop them, and finish them as cancelled.
-- Raises QF004 unknown worker: it counts as lost, and its tasks may be with others.
-- Locks: heartbeats, the worker's own rows.
-- With p_ids, the tasks it is running, only these are looked up: a worker that knows them should say them.
-- Cost: one step in tasks_pkey and one in cancellations_task_idx for each of p_ids; without it all open cancellations are read. Never all the
-- worker's tasks: under a held xmin that would be all it ever ran.
create function fairq.heartbeat(p_worker_id bigint, p_ids bigint[] default null) returns setof bigint
language plpgsql
volatile
rows 1
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform fairq._touch_worker(v_shard_no, p_worker_id, v_now);
    perform fairq._beat(v_shard_no, p_worker_id, v_now);
    if p_ids is not null then
      return query
        select t.id
        from unnest(p_ids) i(id)
        cross join lateral (
          select h.id
          from fairq.tasks h
          where h.shard_no = v_shard_no
            and h.id = i.id
            and h.worker_id is not distinct from p_worker_id
            and exists (select from fairq.cancellations c where c.shard_no = v_shard_no and c.task_id = i.id offset 0)
          offset 0
        ) t;
      continue;
    end if;
    return query
      select distinct t.id
      from fairq.cancellations c
      cross join lateral (
        select h.id
        from fairq.tasks h
        where h.shard_no = v_shard_no
          and h.id = c.task_id
          and h.worker_id is not distinct from p_worker_id
        offset 0
      ) t
      where c.shard_no = v_shard_no;
  end loop;
end;
$$;
comment on function fairq.heartbeat(bigint, bigint[]) is 'A worker''s sign of life. Returns its tasks that are to be cancelled.';

-- sql/functions/held_tasks.sql

-- Which of these tasks the worker still holds, in these attempts. For a handler that ended its task in a transaction of its own: the task is gone when
-- that committed, still held when it rolled back, and locked, so not in the answer, while it is open.
-- Raises QF011 arrays of different length.
-- Locks: tasks, the rows it returns, "skip locked".
create function fairq.held_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  if p_worker_id is null then
    return;
  end if;
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    return query
      select h.id
      from unnest(p_ids, p_attempts) as i(id, attempt)
      cross join lateral (
        select t.id
        from fairq.tasks t
        where t.shard_no = v_shard_no
          and t.id = i.id
          and t.attempt = i.attempt
          and t.worker_id is not distinct from p_worker_id
        for update skip locked
        offset 0
      ) h;
  end loop;
end;
$$;
comment on function fairq.held_tasks(bigint, bigint[], integer[], integer) is
  'Which of these tasks a worker still holds; one that an open transaction is finishing is not in the answer.';

-- sql/functions/maintain.sql

-- Keeps the house: takes tasks from lost workers, gives up claims whose lease ran out, ends what expired, promotes what is due, sweeps, turns the
-- history's pages. Safe to call from anywhere and as often as one likes: one runs at a time per shard, the others return at once.
-- Returns what it did, by name; an empty object when another one was at it.
-- Raises QF005 outside READ COMMITTED.
-- Locks: maintenance, one row per shard; then as the parts say. Bounded by p_limit rows of a kind, so a call is short; call it every few seconds.
create function fairq.maintain(p_limit integer default 10000) returns jsonb
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_worker_id bigint;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_recovered integer := 0;
  v_unclaimed integer := 0;
  v_expired integer := 0;
  v_promoted integer := 0;
  v_swept integer := 0;
  v_partitions integer := 0;
  v_mine boolean := false;
begin
  perform fairq._check_limit(p_limit);
  for v_shard_no in
    select m.shard_no from fairq.maintenance m order by m.shard_no for update skip locked
  loop
    for v_worker_id in
      select w.worker_id
      from fairq.workers w
      where w.shard_no = v_shard_no
        -- While the server was down nobody could give a sign of life.
        and v_now > w.lease + greatest(pg_postmaster_start_time(), w.registered_at, (
          select h.beat_at
          from fairq.heartbeats h
          where h.shard_no = v_shard_no
            and h.worker_id = w.worker_id
          order by h.beat_at desc
          limit 1
        ))
      order by w.worker_id
    loop
      v_recovered := v_recovered + fairq._recover_worker(v_shard_no, v_worker_id, p_limit, v_now);
    end loop;

    v_unclaimed := v_unclaimed + fairq._give_up_claims(v_shard_no, p_limit, v_now);
    v_expired := v_expired + fairq._expire_waiting(v_shard_no, p_limit, v_now);

    for v_queue in select q.* from fairq.queues q order by q.queue loop
      select k.* into v_tick from fairq._tick(v_shard_no, v_queue.queue) k;
      -- Keys and meters that nobody has used have no tick yet, and need none.
      continue when v_queue.internal and v_tick.tick is null;
      if v_tick.tick is null or fairq._has_news(v_tick) then
        v_promoted := v_promoted + coalesce(
          fairq._promote(v_shard_no, v_queue.queue, fairq._ready_target(v_shard_no, v_queue), false), 0);
      end if;
      if fairq._lock_domain(v_shard_no, v_queue.queue, false) then
        v_swept := v_swept + fairq._sweep_domain(v_shard_no, v_queue.queue, p_limit);
      end if;
      if v_promoted > 0 and v_queue.notify and not v_queue.internal then
        perform pg_notify('fairq', v_queue.queue);
      end if;
    end loop;

    v_swept := v_swept + fairq._sweep_keys(v_shard_no, p_limit, v_now);
    v_mine := true;
  end loop;
  -- Last, because it locks the default partitions, where a new installation's finishes go, until the transaction ends.
  if v_mine then
    v_partitions := fairq._rotate_partitions();
  end if;

  return jsonb_strip_nulls(jsonb_build_object(
    'recovered', nullif(v_recovered, 0), 'unclaimed', nullif(v_unclaimed, 0), 'expired', nullif(v_expired, 0),
    'promoted', nullif(v_promoted, 0), 'swept', nullif(v_swept, 0), 'partitions', nullif(v_partitions, 0)));
end;
$$;
comment on function fairq.maintain(integer) is
  'Lost workers, expired claims and tasks, due schedules, sweeps, partitions. Call it every few seconds from anywhere.';

-- sql/functions/next_due_at.sql

-- When a queue has to be looked at again although nothing rings: a scheduled task becomes due, a rate or a breaker lets the next one pass. For workers that sleep.
-- Returns null when there is no such time.
create function fairq.next_due_at(p_queue text) returns timestamptz
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_next timestamptz;
  v_metered timestamptz;
begin
  select min(k.next_due_at) into v_next
  from fairq._shards(null) s(shard_no)
  cross join lateral fairq._tick(s.shard_no, p_queue) k;
  select max((fairq._allowance(l.policy, l.gate, v_now)).look_at) into v_metered
  from (values ('queue ' || p_queue), ('cluster')) m(scope)
  cross join lateral fairq._lane(0, '#meters', m.scope) l
  where l.policy is distinct from null;
  return least(v_next, v_metered);
end;
$$;
comment on function fairq.next_due_at(text) is 'When a sleeping worker should look at a queue again, at the latest.';

-- sql/functions/pause_group.sql

-- Pauses a group: none of its tasks is promoted, those already queued go back in line with the next promotion; running ones go on. Costs the same however
-- much it has waiting.
-- Raises QF001 group key, QF003 unknown queue.
-- Locks: groups, one row.
create function fairq.pause_group(p_queue text, p_group_key text) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_shard_no integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  insert into fairq.groups as g (shard_no, queue, group_key, paused_at)
  values (v_shard_no, p_queue, p_group_key, fairq._now())
  on conflict (shard_no, queue, group_key) do update
  set paused_at = coalesce(g.paused_at, excluded.paused_at);
  perform fairq._ring_group(v_shard_no, p_queue, p_group_key);
end;
$$;
comment on function fairq.pause_group(text, text) is 'Stops serving a group until it is resumed.';

-- sql/functions/pause_queue.sql

-- Pauses a queue: pops return nothing until it is resumed. Creating goes on, running tasks go on.
-- Raises QF003 unknown queue.
-- Locks: queues, one row.
create function fairq.pause_queue(p_queue text) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  update fairq.queues q set paused_at = coalesce(q.paused_at, fairq._now()) where q.queue = p_queue and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
end;
$$;
comment on function fairq.pause_queue(text) is 'Stops serving a queue until it is resumed.';

-- sql/functions/pop_tasks.sql

-- Takes the next tasks of a queue in served order and hands them to a worker, which finishes, releases or loses each of them. Alone enough for a
-- consumer in any language: it promotes by itself when it has to.
-- With p_claim_lease the tasks are claimed, not running: they must be started (start_tasks) before the lease ends, or others get them.
-- Returns the tasks, at most p_limit, in served order; no row when there is nothing to do.
-- Raises QF003 unknown queue, QF004 unknown worker, QF005 not READ COMMITTED, QF007 bad limit, QF009 bad lease, QF015 claim leases under a cap of
-- the cluster.
-- Locks: the tasks it returns; the domain when it promotes. Commit before working on the tasks.
create function fairq.pop_tasks(
  p_queue text,
  p_limit integer,
  p_worker_id bigint,
  p_claim_lease interval default null,
  p_shard_no integer default null
) returns setof fairq.tasks
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
  v_left integer := p_limit;
  v_popped integer;
  v_first integer := floor(random() * 4096)::integer;
  v_may_wait boolean := true;
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation(p_queue);
  if p_claim_lease <= interval '0' or not fairq._is_span(p_claim_lease, '366 days') then
    raise exception 'the claim lease % is out of range', p_claim_lease
      using errcode = 'QF009', hint = 'More than nothing, at most 366 days; leave it null to start the tasks at once.';
  end if;
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;

  -- With several shards, each pop begins with another one. Only there it may have to wait, so it never waits with a domain or tasks of another in hand.
  for v_shard_no in
    select ((s.shard_no + v_first) % s.shard_count)::integer
    from (select h.shard_no, count(*) over () as shard_count from fairq._shards(null) h(shard_no)) s
    where p_shard_no is null
    union all
    select p_shard_no where p_shard_no is not null
  loop
    return query select t.* from fairq._pop(v_shard_no, p_queue, v_left, p_worker_id, p_claim_lease, v_may_wait) t;
    get diagnostics v_popped = row_count;
    v_may_wait := false;
    v_left := v_left - v_popped;
    exit when v_left = 0;
  end loop;
end;
$$;
comment on function fairq.pop_tasks(text, integer, bigint, interval, integer) is
  'Hands the next tasks of a queue to a worker, in served order.';

-- sql/functions/promote_overflow.sql

-- Promotes a queue, in all its shards: hears new rings and refills the ready set if it is short. pop_tasks does this by itself when it has to.
-- Returns the number of tasks that became queued.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED, QF007 bad limit.
-- Locks: the domain, waits for it (see 030_tables.sql); held until the transaction ends.
create function fairq.promote_overflow(p_queue text default 'default', p_limit integer default null, p_shard_no integer default null)
returns integer
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_queue fairq.queues;
  v_shard_no integer;
  v_promoted integer := 0;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  if p_limit is not null then
    perform fairq._check_limit(p_limit);
  end if;

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    v_promoted := v_promoted
      + fairq._promote(v_shard_no, p_queue, coalesce(p_limit, fairq._ready_target(v_shard_no, v_queue)), true);
  end loop;
  return v_promoted;
end;
$$;
comment on function fairq.promote_overflow(text, integer, integer) is
  'Hears new rings and moves waiting tasks into the served order. pop_tasks does this when it has to.';

-- sql/functions/purge_group.sql

-- Cancels everything a group has waiting: overflow, queued, scheduled and blocked tasks. Claimed and running ones are left; cancel_task is for those.
-- Returns how many tasks it ended.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
-- Queued ones are cancelled by promotion, which gives the group its addresses back: it owes nothing for tasks it did not run.
-- Locks: the domain, waits for it; the tasks, queued ones with "skip locked". Cost: what the group has waiting, and the scheduled tasks of the queue.
create function fairq.purge_group(p_queue text, p_group_key text) returns integer
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
as $$
declare
  v_shard_no integer;
  v_ctids tid[];
  v_queued bigint[];
  v_ended integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  perform fairq._lock_domain(v_shard_no, p_queue, true);
  v_queued := array(
    select t.id
    from fairq.tasks t
    where t.shard_no = v_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.state = 'queued'
    for update skip locked
  );
  v_ctids := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = v_shard_no
      and t.queue = p_queue
      and t.group_key = p_group_key
      and t.state in ('scheduled', 'overflow', 'blocked')
    for update skip locked
  );
  v_ended := fairq._end_tasks(v_shard_no, v_ctids, 'cancelled', null, fairq._now());
  insert into fairq.cancellations (shard_no, task_id, requested_at)
  select v_shard_no, q.id, fairq._now()
  from unnest(v_queued) q(id);
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select v_shard_no, p_queue, p_group_key, q.id
  from unnest(v_queued) q(id);
  -- One pass hears ten thousand rings and more; others may wait before these.
  for v_round in 1 .. 100 loop
    perform fairq._promote(v_shard_no, p_queue, 1, true);
    exit when not exists (select from fairq._tick(v_shard_no, p_queue) k where fairq._has_news(k));
  end loop;
  return v_ended + cardinality(v_queued);
end;
$$;
comment on function fairq.purge_group(text, text) is 'Cancels everything a group has waiting. Returns how many tasks that were.';

-- sql/functions/rate_usage.sql

-- How much of a rate is used: of a group's, its own or the one its queue gives to each; with p_group_key null, of the rate of the whole queue.
-- A group's rate is charged when its tasks become ready, a queue's when they are popped. Never by looking.
-- Returns one row; none where no rate holds. available tasks may go at once; when there are none, the next one may at next_at. At full_at all
-- of the burst is there again; null: it is.
-- Raises QF001 group key, QF003 unknown queue.
-- Cost: the settings of the group and its lane, one index step each.
create function fairq.rate_usage(p_queue text, p_group_key text default null)
returns table (
  queue text,
  group_key text,
  rate_limit integer,
  rate_period interval,
  rate_burst integer,
  used integer,
  available integer,
  next_at timestamptz,
  full_at timestamptz
)
language plpgsql
volatile
rows 1
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_lane fairq.lanes;
  v_queue fairq.queues;
  v_group fairq.groups;
  v_policy fairq.policy;
  v_rate fairq.policy;
  v_gate fairq.gate;
begin
  select s.shard_no, s.queue, s.group_key into v_lane.shard_no, v_lane.queue, v_lane.group_key
  from fairq._rate_scope(p_queue, p_group_key) s;
  select q.* into v_queue from fairq.queues q where q.queue = v_lane.queue;
  select g.* into v_group
  from fairq.groups g
  where g.shard_no = v_lane.shard_no
    and g.queue = v_lane.queue
    and g.group_key = v_lane.group_key;
  -- The settings as they are now, of which the lane may not have heard yet.
  v_policy := fairq._policy(v_queue, v_group);
  if v_policy.rate_seconds is null then
    return;
  end if;

  v_lane := fairq._lane(v_lane.shard_no, v_lane.queue, v_lane.group_key);
  v_gate.rate_at := (fairq._settle(v_policy, v_lane.gate, 0, 0, false, v_now)).rate_at;
  v_rate.rate_seconds := v_policy.rate_seconds;
  v_rate.rate_burst := v_policy.rate_burst;
  queue := p_queue;
  group_key := p_group_key;
  rate_limit := coalesce(v_group.rate_limit, v_queue.group_rate_limit);
  rate_period := coalesce(v_group.rate_period, v_queue.group_rate_period);
  rate_burst := v_policy.rate_burst;
  -- What else keeps the group waiting is not asked here.
  select a.tasks, a.look_at into available, next_at from fairq._allowance(v_rate, v_gate, v_now) a;
  used := rate_burst - available;
  full_at := case when v_gate.rate_at > v_now then v_gate.rate_at end;
  return next;
end;
$$;
comment on function fairq.rate_usage(text, text) is 'How much of the rate of a group, or of a whole queue, is used, and when the next task may go.';

-- sql/functions/register_worker.sql

-- Registers a worker. It is alive until it is retired, or gives no sign of life (heartbeat, pop) for p_lease.
-- Returns its id, which every later call names.
-- Raises QF003 unknown queue, QF007 bad slots, QF009 bad lease, QF006 bad name.
create function fairq.register_worker(p_name text, p_queues text[], p_slots integer, p_lease interval default '1 minute') returns bigint
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_worker_id bigint := nextval('fairq.worker_ids');
  v_queue text;
begin
  if p_name is null or p_name = '' or octet_length(p_name) > 200 then
    raise exception 'a worker needs a name of 1 to 200 bytes' using errcode = 'QF006', hint = 'Host and process id make a good one.';
  end if;
  if p_slots is null or p_slots < 1 then
    raise exception 'worker "%" has % slots', p_name, coalesce(p_slots::text, 'null')
      using errcode = 'QF007', hint = 'Slots say how many tasks it runs at once, at least 1.';
  end if;
  -- One lease that cannot be added to a time would fail every later maintain(), for all workers.
  if p_lease is null or p_lease <= interval '0' or not fairq._is_span(p_lease, '366 days') then
    raise exception 'the lease % of worker "%" is out of range', coalesce(p_lease::text, 'null'), p_name
      using errcode = 'QF009', hint = 'More than nothing, at most 366 days; take a few times the heartbeat interval.';
  end if;
  if coalesce(cardinality(p_queues), 0) = 0 then
    raise exception 'worker "%" names no queue', p_name using errcode = 'QF003', hint = 'For example: array[''default''].';
  end if;
  foreach v_queue in array p_queues loop
    if not exists (select from fairq.queues q where q.queue = v_queue and not q.internal) then
      perform fairq._refuse_queue(v_queue);
    end if;
  end loop;

  insert into fairq.workers (shard_no, worker_id, name, queues, slots, lease, registered_at)
  select s.shard_no, v_worker_id, p_name, p_queues, p_slots, p_lease, v_now
  from fairq._shards(null) s(shard_no);
  insert into fairq.heartbeats (shard_no, worker_id, beat_at)
  select s.shard_no, v_worker_id, v_now
  from fairq._shards(null) s(shard_no);
  return v_worker_id;
end;
$$;
comment on function fairq.register_worker(text, text[], integer, interval) is 'Registers a worker and returns its id.';

-- sql/functions/release_tasks.sql

-- Gives tasks back unfinished, without burning an attempt: shutdown, or a worker that took too many. The next attempt has the next number all the same,
-- and the task may have one more.
-- Returns the ids that were accepted; a stale one is missing.
-- Raises QF011 arrays of different length.
-- Locks: tasks, the rows named.
create function fairq.release_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
  v_held record;
begin
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    select h.* into v_held from fairq._held_by(v_shard_no, p_worker_id, p_ids, p_attempts, null) h;
    perform fairq._return_tasks(v_shard_no, v_held.o_ctids, false);
    return query select r.id from unnest(v_held.o_ids) r(id);
  end loop;
end;
$$;
comment on function fairq.release_tasks(bigint, bigint[], integer[], integer) is
  'Puts tasks of a worker back in line without burning an attempt. Returns the ids accepted.';

-- sql/functions/report_progress.sql

-- How far running tasks are, as their handlers say; the newest report of a task replaces the one before.
-- Returns the ids that were accepted; a stale one is missing.
-- Raises QF011 arrays of different length.
-- Locks: progress, the tasks' own rows.
-- Cost: one step in tasks_pkey and one in progress_pkey per task.
create function fairq.report_progress(
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_done double precision[],
  p_totals double precision[] default null,
  p_notes jsonb[] default null,
  p_shard_no integer default null
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  if p_worker_id is null then
    return;
  end if;
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    return query
      with held as materialized (
        select t.id, i.attempt, i.done, i.total, i.note, l.reported_at as previous
        from unnest(p_ids, p_attempts, p_done, p_totals, p_notes) as i(id, attempt, done, total, note)
        cross join lateral (
          select k.id
          from fairq.tasks k
          where k.shard_no = v_shard_no
            and k.id = i.id
            and k.attempt = i.attempt
            and k.worker_id is not distinct from p_worker_id
          offset 0
        ) t
        left join lateral (
          select g.reported_at
          from fairq.progress g
          where g.shard_no = v_shard_no
            and g.task_id = t.id
          order by g.reported_at desc
          limit 1
        ) l on true
      ),
      reported as (
        insert into fairq.progress (shard_no, task_id, reported_at, attempt, done, total, note)
        select v_shard_no, h.id, v_now, h.attempt, h.done, h.total, h.note
        from held h
        on conflict do nothing
      ),
      replaced as (
        delete from fairq.progress g
        using held h
        where g.shard_no = v_shard_no
          and g.task_id = h.id
          and g.reported_at = h.previous
          and h.previous < v_now
      )
      select h.id from held h;
  end loop;
end;
$$;
comment on function fairq.report_progress(bigint, bigint[], integer[], double precision[], double precision[], jsonb[], integer) is
  'How far running tasks are. Returns the ids accepted.';

-- sql/functions/reset_rate.sql

-- Forgets what was used of a rate: of a group's, or, with p_group_key null, of the rate of the whole queue. A full burst may go at once. Tasks that are ready
-- or running already stay so, and are not charged again. Nothing happens where nothing was used.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the domain of the queue, or #meters, and waits for it; lanes, one row replaced.
create function fairq.reset_rate(p_queue text, p_group_key text default null) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_scope record;
  v_lane fairq.lanes;
begin
  select s.shard_no, s.queue, s.group_key into v_scope from fairq._rate_scope(p_queue, p_group_key) s;
  -- The lane first hears all there is to hear; from here on nobody else writes it.
  perform fairq._promote(v_scope.shard_no, v_scope.queue, 1, true);
  v_lane := fairq._lane(v_scope.shard_no, v_scope.queue, v_scope.group_key);
  if (v_lane.gate).rate_at is null then
    return;
  end if;

  v_lane.version := v_lane.version + 1;
  v_lane.gate.rate_at := null;
  insert into fairq.lanes select (v_lane).*;
  delete from fairq.lanes l
  where l.shard_no = v_lane.shard_no
    and l.queue = v_lane.queue
    and l.group_key = v_lane.group_key
    and l.version = v_lane.version - 1;
  -- What it has waiting may go: the next promotion looks at it, and workers that sleep until its next task was due are woken.
  perform fairq._ring_group(v_scope.shard_no, v_scope.queue, v_scope.group_key);
  perform fairq._promote(v_scope.shard_no, v_scope.queue, 1, true);
  if p_group_key is null then
    perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
  end if;
end;
$$;
comment on function fairq.reset_rate(text, text) is 'Forgets what was used of the rate of a group, or of a whole queue.';

-- sql/functions/resume_group.sql

-- Serves a paused group again. It starts at the clock: what it missed is not made up for.
-- Raises QF001 group key, QF003 unknown queue.
-- Locks: groups, one row.
create function fairq.resume_group(p_queue text, p_group_key text) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_shard_no integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  update fairq.groups g
  set paused_at = null
  where g.shard_no = v_shard_no
    and g.queue = p_queue
    and g.group_key = p_group_key;
  perform fairq._ring_group(v_shard_no, p_queue, p_group_key);
end;
$$;
comment on function fairq.resume_group(text, text) is 'Serves a paused group again.';

-- sql/functions/resume_queue.sql

-- Serves a paused queue again; one that drains takes new tasks again.
-- Raises QF003 unknown queue.
-- Locks: queues, one row.
create function fairq.resume_queue(p_queue text) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_notify boolean;
begin
  update fairq.queues q set paused_at = null, draining_at = null where q.queue = p_queue and not q.internal returning q.notify into v_notify;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  if v_notify then
    perform pg_notify('fairq', p_queue);
  end if;
end;
$$;
comment on function fairq.resume_queue(text) is 'Serves a paused queue again, and takes new tasks where it was draining.';

-- sql/functions/retire_worker.sql

-- A worker leaves in good order: what it still holds goes back in line without burning an attempt.
-- Unknown workers are ignored: retiring twice does no harm.
-- Locks: the worker's row, waits for a pop of its to end; tasks it holds.
create function fairq.retire_worker(p_worker_id bigint) returns void
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id for update;
    perform fairq._return_tasks(v_shard_no, array(
      select t.ctid
      from fairq.tasks t
      where t.shard_no = v_shard_no
        and t.worker_id = p_worker_id
      for update
    ), false);
    delete from fairq.heartbeats h where h.shard_no = v_shard_no and h.worker_id = p_worker_id;
    delete from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id;
  end loop;
end;
$$;
comment on function fairq.retire_worker(bigint) is 'Takes a worker off the list and puts what it holds back in line.';

-- sql/functions/retry_task.sql

-- Runs a task again: one that ended otherwise than well, with one attempt more than it had; or one that waits for its back-off or schedule, now.
-- Returns true when there was something to do.
-- Raises QF016: the task ended, and its queue is draining.
-- Locks: the task, and wishes to cancel it.
create function fairq.retry_task(p_id bigint) returns boolean
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
  v_now timestamptz := fairq._now();
  v_sequence bigint := nextval('fairq.task_ids');
  v_task record;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    with ended as (
      delete from fairq.finished_tasks f
      where f.shard_no = v_shard_no
        and f.id = p_id
        and f.outcome <> 'succeeded'
      returning f.*
    )
    insert into fairq.tasks as t (shard_no, id, sequence, queue, group_key, kind, state, priority, created_at, run_at, cost, attempt, max_attempts,
      timeout, idempotency_key, concurrency_key, headers, payload)
    select e.shard_no, e.id, v_sequence, e.queue, e.group_key, e.kind, 'overflow', e.priority, e.created_at, v_now, e.cost, e.attempt,
      greatest(e.max_attempts, e.attempt + 1), e.timeout, e.idempotency_key, e.concurrency_key, e.headers, e.payload
    from ended e
    returning t.shard_no, t.queue, t.group_key, t.priority, t.concurrency_key into v_task;
    if found then
      perform fairq._refuse_draining(q.queue) from fairq.queues q where q.queue = v_task.queue and q.draining_at is not null;
      -- It may have ended because somebody wished so: that wish is fulfilled.
      delete from fairq.cancellations c where c.shard_no = v_shard_no and c.task_id = p_id;
      exit;
    end if;

    update fairq.tasks t
    set state = 'overflow', sequence = v_sequence, run_at = v_now
    where t.shard_no = v_shard_no
      and t.id = p_id
      -- Not "=": with that the planner of a new installation takes the index of due tasks, and reads all of it.
      and t.state is not distinct from 'scheduled'
    returning t.shard_no, t.queue, t.group_key, t.priority, t.concurrency_key into v_task;
    exit when found;
  end loop;
  if v_task.shard_no is null then
    return false;
  end if;

  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  values (v_task.shard_no, v_task.queue, v_task.group_key, v_task.priority, v_sequence, v_task.concurrency_key is not null);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = v_task.queue and q.notify;
  return true;
end;
$$;
comment on function fairq.retry_task(bigint) is 'Runs an ended task again, or a scheduled one now. False: there is no such task.';

-- sql/functions/start_tasks.sql

-- Prefetch only: claimed tasks begin to run. Ownership, lease and deadline are looked at once more, before any user code runs: a task whose
-- claim ran out or was taken over is missing in the answer, one whose deadline passed in the buffer ends as expired and is missing too.
-- Returns the ids to run.
-- Raises QF011 arrays of different length.
-- Locks: tasks, the rows named.
create function fairq.start_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    return query
      select s.id
      from fairq._held_by(v_shard_no, p_worker_id, p_ids, p_attempts, 'claimed') h
      cross join lateral fairq._start(v_shard_no, h.o_ctids, v_now) s(id);
  end loop;
end;
$$;
comment on function fairq.start_tasks(bigint, bigint[], integer[], integer) is
  'Prefetch: claimed tasks begin to run. Returns the ids that the worker still holds.';

-- sql/functions/watch_task.sql

-- Asks for a notice on the channel fairq_done when a task ends, in whatever way. LISTEN first, then call this, then look whether the task is
-- live still: between a look and a watch it might end unheard. Whoever waits for longer than p_for calls it again in time.
-- It holds from the commit of this transaction on; call it in one of its own, and wait outside of any.
-- Returns true when the task was live.
-- Raises QF009 a time that is not positive, or longer than an hour.
-- Locks: none; one insert.
create function fairq.watch_task(p_id bigint, p_for interval default '1 minute') returns boolean
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
begin
  if p_for is null or p_for <= interval '0' or p_for > interval '1 hour' then
    raise exception 'task % cannot be watched for %', coalesce(p_id::text, 'null'), coalesce(p_for::text, 'null')
      using errcode = 'QF009', hint = 'More than nothing, at most an hour; call it again for more.';
  end if;
  select k.shard_no into v_shard_no
  from fairq._shards(null) s(shard_no)
  cross join lateral (select t.shard_no from fairq.tasks t where t.shard_no = s.shard_no and t.id = p_id offset 0) k;
  if not found then
    return false;
  end if;
  insert into fairq.watches (shard_no, task_id, until) values (v_shard_no, p_id, fairq._now() + p_for);
  return true;
end;
$$;
comment on function fairq.watch_task(bigint, interval) is 'Asks for a notice on the channel fairq_done when a task ends. False: it is not live.';

-- sql/grants.sql

-- Four roles, none of which can log in: grant them to the users that do. Nothing is granted to PUBLIC.
--   fairq_enqueue   applications: create, cancel, read a result
--   fairq_work      workers: pop, finish, heartbeat, maintain
--   fairq_observe   dashboards: views and explain_task; no payloads
--   fairq_admin     operators: all of it, and the settings
do $$
declare
  v_role text;
begin
  foreach v_role in array array['fairq_enqueue', 'fairq_work', 'fairq_observe', 'fairq_admin'] loop
    begin
      -- Roles belong to the whole cluster: another database may have made them, perhaps at this very moment.
      if not exists (select from pg_catalog.pg_roles r where r.rolname = v_role) then
        execute format('create role %I nologin', v_role);
      end if;
    exception when duplicate_object or unique_violation then
      null;
    end;
  end loop;
end;
$$;

revoke all on schema fairq from public;
revoke all on all tables in schema fairq from public;
revoke all on all sequences in schema fairq from public;
revoke all on all functions in schema fairq from public;

grant usage on schema fairq to fairq_enqueue, fairq_work, fairq_observe, fairq_admin;
grant execute on all functions in schema fairq to fairq_admin;
grant select, insert, update, delete on all tables in schema fairq to fairq_admin;
grant usage on all sequences in schema fairq to fairq_admin;

grant execute on function
  fairq.create_task(text, jsonb, text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text, jsonb, boolean),
  fairq.create_tasks(text[], jsonb[], text, text, integer, timestamptz, timestamptz, integer, double precision, interval, text[], text[], jsonb, integer[], double precision[], boolean),
  fairq.cancel_task(bigint),
  fairq.watch_task(bigint, interval),
  fairq._check_task(text, jsonb, integer, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text),
  fairq._claim_idempotency_key(integer, text, text, text, text, jsonb, bigint),
  fairq._refuse_queue(text),
  fairq._refuse_draining(text),
  fairq._announced(integer, text),
  fairq._shard_of(text, integer),
  fairq._shards(integer),
  fairq._now()
to fairq_enqueue, fairq_work;
grant select on fairq.settings, fairq.queues to fairq_enqueue, fairq_work, fairq_observe;
grant select on fairq.schema_version to fairq_enqueue, fairq_work, fairq_observe;
grant insert on fairq.tasks, fairq.rings, fairq.cancellations, fairq.watches to fairq_enqueue;
grant select (shard_no, id, queue, group_key, state, worker_id) on fairq.tasks to fairq_enqueue;
grant select (shard_no, queue, tick, next_xid, heard_xid) on fairq.ticks to fairq_enqueue;
grant select (shard_no, queue, xid, announced) on fairq.rings to fairq_enqueue;
grant select (shard_no, id, outcome, finished_at, result, error) on fairq.finished_tasks to fairq_enqueue;
grant select, insert on fairq.idempotency_keys to fairq_enqueue;
grant select on fairq.progress to fairq_enqueue;
grant usage on sequence fairq.task_ids, fairq.ring_ids to fairq_enqueue, fairq_work;

grant execute on all functions in schema fairq to fairq_work;
revoke execute on function
  fairq.configure_cluster(integer, integer, integer, text[]),
  fairq.configure_queue(text, integer, integer, interval, interval, interval, boolean, double precision, text, integer, integer, interval, integer, integer, interval, integer, integer, interval, integer, integer, interval, text[]),
  fairq.configure_group(text, text, double precision, integer, integer, interval, integer, integer, interval, text[]),
  fairq.configure_key(text, integer, text[]),
  fairq.pause_queue(text),
  fairq.resume_queue(text),
  fairq.pause_group(text, text),
  fairq.resume_group(text, text),
  fairq.purge_group(text, text),
  fairq.drain_queue(text),
  fairq.reset_rate(text, text)
from fairq_work;
grant select, insert, update, delete on
  fairq.tasks, fairq.rings, fairq.lanes, fairq.ticks, fairq.workers, fairq.heartbeats, fairq.cancellations, fairq.watches, fairq.idempotency_keys, fairq.sweeps, fairq.progress,
  fairq.finished_tasks, fairq.finished_tasks_default, fairq.attempts, fairq.attempts_default
to fairq_work;
-- A row lock asks for the right to update; these rows are never updated.
grant select, update on fairq.domains, fairq.maintenance to fairq_work;
grant select on fairq.groups to fairq_work;
grant usage on sequence fairq.worker_ids to fairq_work;

grant execute on function fairq.explain_task(bigint), fairq._shards(integer), fairq._now(), fairq._allowance(fairq.policy, fairq.gate, timestamptz),
  fairq._lane(integer, text, text), fairq._obstacles(integer, text, text, text, text, timestamptz), fairq.next_due_at(text), fairq._tick(integer, text),
  fairq.rate_usage(text, text), fairq._rate_scope(text, text), fairq._check_group(text, text), fairq._refuse_queue(text), fairq._shard_of(text, integer),
  fairq._policy(fairq.queues, fairq.groups), fairq._settle(fairq.policy, fairq.gate, integer, integer, boolean, timestamptz)
to fairq_observe;
grant select on fairq.queue_stats, fairq.group_stats, fairq.worker_stats, fairq.estimates to fairq_observe, fairq_work;
grant select on fairq.lanes, fairq.ticks, fairq.workers, fairq.domains, fairq.heartbeats, fairq.attempts, fairq.groups, fairq.progress to fairq_observe;
grant select (shard_no, id, sequence, queue, group_key, kind, state, priority, block, position, worker_id, created_at, run_at, expires_at,
  started_at, lease_expires_at, cost, attempt, max_attempts, counted, concurrency_key) on fairq.tasks to fairq_observe;
grant select (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at, started_at, finished_at,
  cost, attempt, max_attempts, concurrency_key) on fairq.finished_tasks to fairq_observe;

set local check_function_bodies = on;
