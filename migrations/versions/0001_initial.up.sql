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

-- Length of one round of the round robin in units of the virtual time: a task of cost 1 in a group of weight 1 moves its group by this much.
create function fairq._round() returns bigint
language sql immutable parallel safe
as $$ select 1048576::bigint $$;

-- A distance in virtual time as a number of rounds.
create function fairq._rounds(p_distance bigint) returns double precision
language sql immutable parallel safe
as $$ select p_distance::double precision / fairq._round() $$;

-- How far a task moves its group in virtual time. At least one unit, so two tasks of a group never share an address; at most 2^20 rounds, so that a
-- million tasks ahead fit in a bigint.
create function fairq._step(p_cost double precision, p_weight double precision) returns bigint
language sql immutable parallel safe
as $$ select least(1099511627776, greatest(1, ceil(fairq._round() * p_cost / p_weight)))::bigint $$;

-- Position of a lane in its blocks. Between two lanes there is room for 2^20 newcomers, who are served as soon as they come.
create function fairq._lane_position(p_lane_no bigint) returns bigint
language sql immutable parallel safe
as $$ select p_lane_no << 20 $$;

-- The last position before the next lane.
create function fairq._gap_end(p_position bigint) returns bigint
language sql immutable parallel safe
as $$ select ((p_position >> 20) + 1 << 20) - 1 $$;

-- The shard of a group: the first 60 bits of the md5 of its key, modulo the number of shards. Frozen: stored tasks depend on it.
create function fairq._shard_of(p_group_key text, p_shard_count integer) returns integer
language sql immutable parallel safe as $$
  select case
    when p_shard_count = 1 then 0
    else (('x' || left(md5(p_group_key), 15))::bit(60)::bigint % p_shard_count)::integer
  end
$$;

-- Whether an interval is neither negative nor longer than another one. Its parts are looked at, too: a thousand years less so many days may be short,
-- and is out of range as soon as it is added to a time.
create function fairq._is_span(p_time interval, p_longest interval) returns boolean
language sql immutable parallel safe as $$
  select p_time between interval '0' and p_longest and abs(extract(year from p_time)) <= 100 and abs(extract(day from p_time)) <= 36525
$$;

-- The one clock of the engine: the wall clock, or the session setting fairq.now, which only tests set. Never now(): a lease must not stand still in a
-- long transaction.
create function fairq._now() returns timestamptz
language sql parallel safe
as $$ select coalesce(nullif(current_setting('fairq.now', true), '')::timestamptz, clock_timestamp()) $$;

-- The clock of what recovers or drops: fairq.now moves it only where the installation says that it is for tests. Nobody else loses tasks or history
-- to a session setting.
create function fairq._wall() returns timestamptz
language plpgsql set search_path = '' as $$
begin
  if exists (select from fairq.settings s where s.test_clock) then
    return fairq._now();
  end if;
  return clock_timestamp();
end;
$$;

-- sql/schema/030_tables.sql

-- Four tables hold a task, each row written as seldom as can be:
--   tasks    the body: what the application asked for. Written once by the application, removed once when the task ends.
--   ready    the small ordered set that pops read. Derived.
--   held     who has it, and which places it takes. The truth about holders.
--   parked   what promotion met and whose concurrency key had no place. Derived.
-- A task waits when its body is in line (not scheduled) and it is in none of the other three: waiting is nowhere written down.
--
-- Lock order of the engine. Whoever needs several of these takes them from top to bottom:
--   1. settings             every configure_* first of all, so that two of them never wait for each other in a circle
--   2. idempotency_keys     create_task, equal keys wait for each other; nothing else waits here
--   3. domains              promotion, one at a time per (shard, queue). A pop that asks the meters locks #meters before the queue; a promotion
--                           that meets concurrency keys locks the queue before #keys
--   4. held                 by their holder in the order of the ids, or by recovery with "skip locked"
--   5. ready, parked        leave by pop or promotion, both "skip locked"
--   6. tasks                bodies of waiting tasks change under the domain's lock only, those of held ones by their holder
--   7. lanes, ticks         written under the domain's lock only
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

-- Settings are columns: of fairq.settings, fairq.queues and fairq.groups. Their ranges are in fairq._check_settings, which alone leads into them.
create table fairq.settings (
  singleton boolean primary key default true,
  shard_count integer not null default 1,
  payload_limit integer not null default 1048576,
  max_running integer,
  test_clock boolean not null default false,
  constraint settings_has_one_row check (singleton)
);
comment on table fairq.settings is 'Settings of the whole installation, one row. Change them with fairq.configure_cluster().';
comment on column fairq.settings.shard_count is 'Number of shards. Fixed once tasks exist.';
comment on column fairq.settings.payload_limit is 'Largest payload, and largest headers, that create_task accepts, in bytes of their text form.';
comment on column fairq.settings.test_clock is 'Tests only: what recovers or drops heeds the session setting fairq.now, too.';
comment on column fairq.settings.max_running is 'Most tasks in flight at once over all queues and workers; null: no cap.';

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
  max_running integer,
  rate_limit integer,
  rate_period interval,
  rate_burst integer,
  breaker_threshold integer,
  breaker_cooldown interval,
  metered boolean not null default false,
  internal boolean not null default false,
  paused_at timestamptz,
  draining_at timestamptz,
  constraint queue_name_in_range check (octet_length(queue) between 1 and 200)
);
comment on table fairq.queues is 'Queues and their settings. Change them with fairq.configure_queue().';
comment on column fairq.queues.ready_target is 'How many tasks a pass makes ready beside those it hands over; null: as many as other workers need, and are worth a pass.';
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
comment on column fairq.queues.max_running is 'Most tasks of the whole queue in flight at once; null: no cap.';
comment on column fairq.queues.rate_limit is 'Tasks of the whole queue per rate_period; null: no limit.';
comment on column fairq.queues.rate_period is 'The period of rate_limit.';
comment on column fairq.queues.rate_burst is 'How many tasks of the whole queue may go ahead of its rate; null: a second''s worth, at least one.';
comment on column fairq.queues.breaker_threshold is 'Failures in a row, of any group, that open the breaker of the whole queue; null: no breaker.';
comment on column fairq.queues.breaker_cooldown is 'How long that breaker stays open before it tries one task.';
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
  primary key (shard_no, queue, group_key)
);
comment on table fairq.groups is
  'Groups with settings of their own. Groups need no row here: unknown ones have the settings of their queue. Concurrency keys have theirs here, too, as groups of #keys.';
comment on column fairq.groups.max_running is 'Most tasks in flight at once.';
comment on column fairq.groups.rate_limit is 'Tasks per rate_period.';
comment on column fairq.groups.rate_period is 'The period of rate_limit.';
comment on column fairq.groups.rate_burst is 'How many tasks may go ahead of the rate; null: a second''s worth, at least one.';
comment on column fairq.groups.breaker_threshold is 'Failures in a row that open the breaker.';
comment on column fairq.groups.breaker_cooldown is 'How long the breaker stays open before it tries one task.';
comment on column fairq.groups.paused_at is 'When the group was paused; null: it is not.';

-- A row "is not null" only when all its fields are: ask whether a policy "is distinct from null".
create type fairq.policy as (
  max_running integer, paused_at timestamptz, rate_seconds double precision, rate_burst integer, breaker_threshold integer, breaker_cooldown interval
);
comment on type fairq.policy is 'What limits a group: its own settings, else its queue''s. See _policy, _allowance, _charge, _settle.';

create type fairq.gate as (
  in_flight integer, uncounted integer, rate_at timestamptz, failures integer, open_until timestamptz, probe_until timestamptz
);
comment on type fairq.gate is 'Where a group stands with its limits: places taken, also by tasks that are not counted yet (see _adopt), rate used, breaker.';

create type fairq.estimate as (kind text, tasks integer, seconds double precision);
comment on type fairq.estimate is 'How long the tasks of a kind ran: how many were measured, and the mean of the last ones.';

create type fairq.pace as (last_block bigint, credit bigint, estimates fairq.estimate[]);
comment on type fairq.pace is 'What the tasks of a group take, where groups share time: its estimates; the block of its last address, which no correction goes behind; and what could not be given back yet for that reason.';

create type fairq.allowance as (tasks integer, look_at timestamptz, reason text);
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
  created_at timestamptz not null,
  run_at timestamptz not null,
  expires_at timestamptz,
  cost double precision not null,
  attempt integer not null default 0,
  max_attempts integer not null,
  scheduled boolean not null default false,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  kind text collate "C" not null,
  timeout interval,
  idempotency_key text collate "C",
  concurrency_key text collate "C",
  headers jsonb,
  payload jsonb not null,
  constraint tasks_pkey primary key (shard_no, id)
);
comment on table fairq.tasks is 'Bodies of live tasks: what the application asked for. The truth; with fairq.held everything else can be rebuilt from it.';
comment on column fairq.tasks.sequence is 'Order in which the tasks of a group became runnable. A task that comes back keeps it.';
comment on column fairq.tasks.run_at is 'Not before this time: as asked, or the end of the back-off.';
comment on column fairq.tasks.expires_at is 'Past this time the task is not started any more.';
comment on column fairq.tasks.scheduled is 'Waits for run_at; otherwise it is in line.';
comment on column fairq.tasks.attempt is 'Attempts begun before the present one, those given back included.';
comment on column fairq.tasks.max_attempts is 'Number of the last attempt it may have: as asked, and one more for each that was given back.';
comment on column fairq.tasks.timeout is 'Longest run time of one attempt; enforced by the worker.';

create table fairq.ready (
  shard_no integer not null,
  priority integer not null,
  id bigint not null,
  sequence bigint not null,
  block bigint not null,
  position bigint not null,
  charge double precision,
  counted boolean not null,
  keyed boolean not null,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  constraint ready_pkey primary key (shard_no, id)
);
comment on table fairq.ready is 'Tasks that may be popped, in served order: few, whatever the backlog. Derived.';
comment on column fairq.ready.block is 'Block address: virtual start time, 2^20 units per round.';
comment on column fairq.ready.position is 'Order inside the block: the lane''s position, or a newcomer''s before the lane that is next.';
comment on column fairq.ready.charge is 'Seconds charged to its group, where groups share time; the end of the attempt reports the difference.';
comment on column fairq.ready.counted is 'The task takes one of its group''s places.';
comment on column fairq.ready.keyed is 'The task has a place of its concurrency key.';

create table fairq.held (
  shard_no integer not null,
  attempt integer not null,
  id bigint not null,
  worker_id bigint not null,
  started_at timestamptz,
  lease_expires_at timestamptz,
  charge double precision,
  meters integer not null,
  counted boolean not null,
  keyed boolean not null,
  constraint held_pkey primary key (shard_no, id)
);
comment on table fairq.held is 'Who has a task, and which places it takes: what it gives back when it leaves is what its own row here says.';
comment on column fairq.held.attempt is 'With worker_id the fencing token of the holder, so never given out twice.';
comment on column fairq.held.started_at is 'When the attempt began; null: claimed, not started yet.';
comment on column fairq.held.lease_expires_at is 'End of the claim lease of a prefetched task.';
comment on column fairq.held.charge is 'Seconds charged to its group, where groups share time.';
comment on column fairq.held.meters is 'The task has a place of its queue (1), of the cluster (2).';
comment on column fairq.held.counted is 'The task has one of its group''s places.';
comment on column fairq.held.keyed is 'The task has a place of its concurrency key.';

create table fairq.parked (
  shard_no integer not null,
  priority integer not null,
  id bigint not null,
  sequence bigint not null,
  turn bigint,
  granted boolean not null default false,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  concurrency_key text collate "C" not null,
  constraint parked_pkey primary key (shard_no, id)
);
comment on table fairq.parked is 'Tasks whose concurrency key had no place when their turn came: out of the line until they are given one. Derived.';
comment on column fairq.parked.turn is 'When the group is next at this key, in virtual time of the key; of each group the first task has it.';
comment on column fairq.parked.granted is 'The task was given a place of its key, and has it until it leaves.';

-- What promotion found for a task, on its way to ready or straight to held.
create type fairq.placed as (
  id bigint, block bigint, position bigint, charge double precision, counted boolean, keyed boolean, priority integer, sequence bigint,
  group_key text, ready tid
);
comment on type fairq.placed is 'A task with its address, and where it is in fairq.ready; null: it was promoted a moment ago, and is not.';

create type fairq.popped as (
  shard_no integer, id bigint, attempt integer, max_attempts integer, queue text, group_key text, kind text, priority integer, cost double precision,
  created_at timestamptz, run_at timestamptz, expires_at timestamptz, started_at timestamptz, lease_expires_at timestamptz, timeout interval,
  idempotency_key text, concurrency_key text, headers jsonb, payload jsonb, block bigint, position bigint
);
comment on type fairq.popped is 'A task as its worker gets it: the body, the attempt, and the address at which it was served.';

-- What a worker's turn answers: first what was accepted, then the tasks, a row each.
create type fairq.turned as (
  ended bigint[], released bigint[], started bigint[], due_in double precision, id bigint, attempt integer, max_attempts integer, queue text,
  group_key text, kind text, started_at timestamptz, timeout interval, headers jsonb, payload jsonb
);
comment on type fairq.turned is 'The answer to fairq.turn(): one row of what was accepted, then the tasks.';

-- A task on its way out of flight, its rows locked: where they are, what they hold, and how it leaves.
create type fairq.leaving as (
  id bigint, body tid, held tid, ready tid, parked tid, outcome text, result jsonb, error jsonb, run_at timestamptz, attempt integer,
  worker_id bigint, started_at timestamptz, charge double precision, meters integer, counted boolean, keyed boolean
);
comment on type fairq.leaving is 'A task that leaves flight, see _leave.';

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
  configured boolean not null default false,
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
comment on column fairq.rings.configured is 'The limits of the group changed: what it has ready goes back in line.';
comment on column fairq.rings.cancelled_id is 'The task to cancel, while it is waiting.';

create type fairq.cursor as (priority integer, sequence bigint, touched bigint, is_open boolean);
comment on type fairq.cursor is
  'A priority level of a lane: no task of this priority waits before the sequence; after touched all of them wait, up to it a look-up decides. An open one stands for all lower levels, too.';

-- What the rings of a group said, taken together.
create type fairq.news as (
  group_key text, freed integer, failures integer, succeeded boolean, keyed boolean, configured boolean, first_sequence bigint, heard fairq.cursor[],
  correction double precision, ran fairq.estimate[]
);
comment on type fairq.news is 'What the new rings of a group say, see _hear.';

create type fairq.heard as (xid xid8, ring_id bigint);
comment on type fairq.heard is 'A transaction, and up to which of its rings they were heard.';

create table fairq.lanes (
  shard_no integer not null,
  last_priority integer not null default 0,
  last_sequence bigint not null default 0,
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
comment on column fairq.lanes.gate is 'Where it stands with its limits; in_flight counts its tasks that are ready or held.';
comment on column fairq.lanes.pace is 'How long its tasks take; null: groups of the queue share by count.';
comment on column fairq.lanes.look_at is 'It has overflow that may not be promoted before this time.';
comment on column fairq.lanes.keyed is 'Some of its tasks have a concurrency key.';
comment on column fairq.lanes.admissible is 'Has overflow that may be promoted now.';
comment on column fairq.lanes.cursors is 'Where its waiting tasks begin, per priority level, highest first; empty: it has none.';
comment on column fairq.lanes.last_sequence is 'Sequence of that task.';
comment on column fairq.lanes.last_priority is 'With last_sequence the task promoted last: one before it that comes later, or comes back, overtakes it.';

create table fairq.ticks (
  shard_no integer not null,
  written_by xid not null default pg_current_xact_id()::xid,
  tick bigint not null,
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
  touched bigint not null,
  first_version bigint not null,
  announce_from bigint,
  filled integer not null,
  keyed boolean not null default false,
  queue text collate "C" not null,
  pending fairq.heard[] not null,
  constraint ticks_pkey primary key (shard_no, queue, tick),
  constraint horizon_is_whole check ((horizon is null) = (horizon_position is null))
);
comment on table fairq.ticks is 'What promotion has seen and decided, append-only, read newest first.';
comment on column fairq.ticks.written_by is
  'Transaction that wrote this row. After a dump is restored it differs from the row''s xmin: the horizon below means nothing then, and the engine rebuilds its state.';
comment on column fairq.ticks.clock is
  'The block being served; with clock_position the address before which nothing is ever ready again: the lower bound of every scan of the ready index.';
comment on column fairq.ticks.top is 'Highest finish tag ever given: where the clock goes when nothing is left.';
comment on column fairq.ticks.horizon is 'Address of the first task not yet promoted; null: all are. Tasks beyond it are not popped, so no group is overtaken.';
comment on column fairq.ticks.horizon_position is 'Position of that address.';
comment on column fairq.ticks.clock_position is 'Position that goes with the clock: right after the lane served last in that block, or a newcomer''s.';
comment on column fairq.ticks.filled is 'Tasks put into the ready set since pops passed the middle of it.';
comment on column fairq.ticks.refill_position is 'Position that goes with refill_block.';
comment on column fairq.ticks.newcomer_position is 'The position last given to a newcomer in the block of the clock.';
comment on column fairq.ticks.refill_block is 'With refill_position: when pops get here the ready set is half empty.';
comment on column fairq.ticks.next_xid is 'Rings of this transaction and later ones are new.';
comment on column fairq.ticks.pending is 'Earlier transactions that were still running, or of which only a part was heard: the rest of their rings is new as well.';
comment on column fairq.ticks.touched is 'Highest sequence ever taken out of the line: what comes after it waits for certain, whatever a lane knows.';
comment on column fairq.ticks.first_version is 'Lanes of lower versions are from before a rebuild, and do not count.';
comment on column fairq.ticks.announce_from is 'After a rebuild: bodies from this id on are still to be announced; null: all are.';
comment on column fairq.ticks.heard_xid is 'A transaction at or past next_xid of whose rings those up to heard_ring were heard: the one that wrote the tick, which no snapshot lists; 0: none.';
comment on column fairq.ticks.heard_ring is 'The last ring heard of that transaction.';
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
  lost_at timestamptz,
  name text not null,
  queues text[] not null,
  primary key (shard_no, worker_id),
  constraint slots_positive check (slots >= 1),
  constraint lease_positive check (lease > interval '0')
);
comment on table fairq.workers is 'Workers that are alive, not yet known to be lost, or lost with tasks still to be taken from them.';
comment on column fairq.workers.lost_at is 'When recovery gave it up: from then on its calls are refused.';
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

create table fairq.upkeep_failures (
  shard_no integer not null,
  part text collate "C" not null,
  failed_since timestamptz not null,
  failed_at timestamptz not null,
  message text not null,
  primary key (shard_no, part)
);
comment on table fairq.upkeep_failures is 'Parts of fairq.maintain() that failed when they were last run, and since when.';
comment on column fairq.upkeep_failures.part is 'One of fairq.upkeep_parts().';
comment on column fairq.upkeep_failures.failed_since is 'When it failed first; the row goes when it succeeds.';
comment on column fairq.upkeep_failures.failed_at is 'When it failed last.';
comment on column fairq.upkeep_failures.message is 'What it failed with.';

create table fairq.maintenance (
  shard_no integer primary key
);
comment on table fairq.maintenance is 'One row per shard, never updated: its row lock lets one fairq.maintain() run at a time.';

-- sql/schema/040_indexes.sql

-- promotion: a group's line, from the lane's cursor on. Held and ready tasks stand in it, too, behind the cursor.
create index tasks_line_idx on fairq.tasks (shard_no, queue, group_key, priority desc, sequence) where not scheduled;

-- promotion: scheduled tasks that are due.
create index tasks_due_idx on fairq.tasks (shard_no, queue, run_at) where scheduled;

-- maintain: deadlines passed while waiting.
create index tasks_expiry_idx on fairq.tasks (shard_no, expires_at) where expires_at is not null;

-- pop_tasks, the clock: tasks in served order, from the clock on. Partial, though it holds for every row: so that no look-up of an id is led here by
-- statistics of an empty table.
create index ready_order_idx on fairq.ready (shard_no, queue, block, position) where position >= 0;

-- maintain: claims whose lease ran out (prefetch only).
create index held_claim_lease_idx on fairq.held (shard_no, lease_expires_at) where lease_expires_at is not null;

-- promotion: the group whose turn it is at a concurrency key, from the key's own clock on.
create index parked_turn_idx on fairq.parked (shard_no, concurrency_key, turn) where turn is not null;

-- promotion: the tasks of a group that wait for a key.
create index parked_line_idx on fairq.parked (shard_no, concurrency_key, queue, group_key, priority desc, sequence) where not granted;

-- promotion: tasks that were given a key and not placed yet.
create index parked_granted_idx on fairq.parked (shard_no, queue) where granted;

-- promotion: new rings, by transaction; within the transaction that promoted last, those it rang since.
create index rings_xid_idx on fairq.rings (shard_no, queue, xid, ring_id);

-- create_task: whether a NOTIFY is on its way, or not yet heeded.
create index rings_announced_idx on fairq.rings (shard_no, queue, xid) where announced;

-- promotion: lanes with admissible overflow in order of their next task; maintain: idle lanes behind the clock.
create index lanes_order_idx on fairq.lanes (shard_no, queue, admissible, finish, position);

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

-- sql/create/create_task.sql

-- Creates a task in the caller's transaction. Two inserts, the task and its ring: nothing shared is locked, updated or waited for, in any
-- isolation level (I2); only equal idempotency keys wait for each other.
-- p_promote assigns the block address at once. That takes the domain's lock until the transaction ends: for a transaction that ends here.
-- Returns the id of the task; with a known idempotency key, the id of the task that has it.
-- Raises QF001 to QF010 (see _check_task), QF003 unknown queue, QF005 p_promote outside READ COMMITTED, QF016 the queue is draining (a known
-- idempotency key is answered all the same).
create function fairq.create_task(
  p_group_key text, p_payload jsonb, p_queue text default 'default', p_kind text default 'default', p_priority integer default 0,
  p_run_at timestamptz default null, p_expires_at timestamptz default null, p_max_attempts integer default null, p_cost double precision default 1,
  p_timeout interval default null, p_idempotency_key text default null, p_concurrency_key text default null, p_headers jsonb default null,
  p_promote boolean default false
) returns bigint
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
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
    p_cost, p_timeout, p_idempotency_key, p_concurrency_key, p_headers);

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

  insert into fairq.tasks (shard_no, id, sequence, queue, group_key, kind, priority, created_at, run_at, expires_at, cost,
    max_attempts, timeout, idempotency_key, concurrency_key, scheduled, headers, payload)
  values (v_shard_no, v_id, v_id, p_queue, p_group_key, p_kind, p_priority,
    v_now, coalesce(p_run_at, v_now), p_expires_at, p_cost, coalesce(p_max_attempts, v_settings.max_attempts), p_timeout,
    p_idempotency_key, p_concurrency_key, v_scheduled, p_headers, p_payload);

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
comment on function fairq.create_task is
  'Creates a task in the caller''s transaction, without waiting for anyone. Returns its id.';

-- What is wrong with a task, said clearly, before anything is written.
-- Raises QF001 group key, QF002 payload, QF006 other keys, QF008 cost, QF009 times, QF007 attempts.
create function fairq._check_task(
  p_group_key text, p_payload jsonb, p_payload_limit integer, p_kind text, p_priority integer, p_run_at timestamptz, p_expires_at timestamptz,
  p_max_attempts integer, p_cost double precision, p_timeout interval, p_idempotency_key text, p_concurrency_key text, p_headers jsonb
) returns void
language plpgsql immutable set search_path = '' as $$
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
      using errcode = 'QF002', hint = 'Store the data elsewhere and pass a reference, or raise the limit: select fairq.configure_cluster(''{"payload_limit": ...}'');';
  end if;
  if pg_column_size(p_headers) > p_payload_limit / 4 and octet_length(p_headers::text) > p_payload_limit then
    raise exception 'the headers of a task of group "%" have % bytes, % are allowed', p_group_key, octet_length(p_headers::text), p_payload_limit
      using errcode = 'QF002', hint = 'Headers say how to treat a task; data belongs into the payload or elsewhere.';
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
  if p_run_at not between '0001-01-01 00:00+00' and '9999-12-31 00:00+00' or p_expires_at not between '0001-01-01 00:00+00' and '9999-12-31 00:00+00' then
    raise exception 'run_at or expires_at of a task of group "%" is out of range', p_group_key
      using errcode = 'QF009', hint = 'A time in the years 1 to 9999; leave it null for none.';
  end if;
  -- Workers keep a length of time in types that end somewhere: one task that none of them can read would stop them all.
  if p_timeout is not null and (p_timeout <= interval '0' or p_timeout > interval '1000000000 seconds') then
    raise exception 'the timeout % of a task of group "%" is out of range', p_timeout, p_group_key
      using errcode = 'QF009', hint = 'More than 0, at most 1000000000 seconds; null for no limit.';
  end if;
end;
$$;

-- Takes an idempotency key for a new task. Equal keys wait for each other here, and only here, until the first one's transaction ends.
-- Returns the id of the task that has the key already; null: the key is ours.
-- Raises QF010 when that task has another payload or kind; in REPEATABLE READ and above, the usual 40001 when the other task came after the snapshot.
-- Locks: idempotency_keys, one row.
create function fairq._claim_idempotency_key(
  p_shard_no integer, p_queue text, p_group_key text, p_idempotency_key text, p_kind text, p_payload jsonb, p_id bigint
) returns bigint
language plpgsql set search_path = '' as $$
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
    where k.shard_no = p_shard_no and k.queue = p_queue and k.group_key = p_group_key and k.idempotency_key = p_idempotency_key;
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

-- Whether workers have been told by NOTIFY of something in this domain that no promotion has heard yet. Another NOTIFY would tell them nothing, and it is dear: it
-- takes a database-wide lock that is held until the commit is on disk, so all who notify commit one after the other.
-- A promotion that is under way may hear that ring and not the caller's. So NOTIFY is a hint: whoever sleeps looks again a few milliseconds
-- after it last found something, then after pauses that double (see the worker). Of a transaction open for as long it learns about as much later.
-- Only in READ COMMITTED: an older snapshot knows nothing of what was heard since, and what SERIALIZABLE reads here would make enqueuers fail for each other.
-- One look-up each in ticks and rings: of an open transaction one ring is announced at most, however many it has.
-- Stable, without "set search_path": inlined into the statement that asks.
create function fairq._announced(p_shard_no integer, p_queue text) returns table (is_announced boolean)
language sql stable rows 1 as $$
  select case
    when current_setting('transaction_isolation') <> 'read committed' then false
    else exists (
      select
      from (values (1)) one
      left join lateral (
        select t.next_xid, t.heard_xid
        from fairq.ticks t
        where t.shard_no = p_shard_no and t.queue = p_queue
        order by t.tick desc
        limit 1
      ) k on true
      cross join lateral (
        select
        from fairq.rings r
        where r.shard_no = p_shard_no and r.queue = p_queue
          and r.announced
          and r.xid >= coalesce(k.next_xid, '0')
          and r.xid <> coalesce(k.heard_xid, '0')
        limit 1
      ) r
    )
  end
$$;

-- sql/create/create_tasks.sql

-- Creates many tasks with one call; each array has one element per task, the other options hold for all of them.
-- One ring per group and priority, not per task.
-- Returns the ids in the order of the input.
-- Raises what create_task raises, and QF011 when the arrays differ in length. Nothing is created then.
create function fairq.create_tasks(
  p_group_keys text[], p_payloads jsonb[], p_queue text default 'default', p_kind text default 'default', p_priority integer default 0,
  p_run_at timestamptz default null, p_expires_at timestamptz default null, p_max_attempts integer default null, p_cost double precision default 1,
  p_timeout interval default null, p_idempotency_keys text[] default null, p_concurrency_keys text[] default null, p_headers jsonb default null,
  p_priorities integer[] default null, p_costs double precision[] default null, p_promote boolean default false
) returns setof bigint
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
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
      p_run_at, p_expires_at, p_max_attempts, coalesce(v_wrong.cost, p_cost), p_timeout, v_wrong.idempotency_key, v_wrong.concurrency_key, p_headers);
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
        insert into fairq.tasks (shard_no, id, sequence, queue, group_key, kind, priority, created_at, run_at, expires_at, cost,
          max_attempts, timeout, concurrency_key, scheduled, headers, payload)
        select i.shard_no, i.id, i.id, p_queue, i.group_key, p_kind,
          i.task_priority, v_now, coalesce(p_run_at, v_now), p_expires_at, coalesce(i.cost, p_cost),
          coalesce(p_max_attempts, v_settings.max_attempts), p_timeout, i.concurrency_key, coalesce(p_run_at > v_now, false), p_headers, i.payload
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
comment on function fairq.create_tasks is
  'Creates many tasks with one call. Returns their ids in the order of the input.';

-- sql/promote/admit.sql

-- Gives addresses to waiting tasks. Where they go, straight to a worker or into the ready set, is not decided here.
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
-- What has a limit that runs with time is only given to a pop that takes it now (p_take tasks, p_ready being those in order before). A rate is charged
-- for nothing that waits, a concurrency key is not held from far back: such a lane stops at its next task, and the horizon with it.
--
-- One pass, lanes -> lateral tasks, and the new lane versions from the same rows: a join between these CTEs would be a nested loop, because
-- the planner expects one row of each.
--
-- How many tasks a lane with limits may have, says _allowance, what they use up, _charge. In a lane whose tasks have concurrency keys,
-- _take_keys says which are next, and passes over those whose key is taken.
-- p_lanes are all written again. Expired tasks get no address; the caller ends them.
-- Locks: lanes; the caller holds the domain, under which bodies that wait do not change.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_line_idx from each lane's cursor.
create function fairq._admit(
  p_tick fairq.ticks, p_lanes fairq.lanes[], p_refill boolean, p_budget integer, p_take integer, p_ready fairq.placed[], p_now timestamptz,
  out o_tick fairq.ticks, out o_placed fairq.placed[], out o_expired bigint[]
)
language plpgsql set search_path = '' as $$
declare
  v_replaced tid[];
  v_touched bigint;
  v_keyed boolean;
  -- With so many ready tasks before it, nothing reaches this pop any more.
  v_last fairq.placed := p_ready[p_take];
begin
  o_tick := p_tick;
  with waiting as (
    select l.ctid as replaces, l.lane_no, l.version, l.finish, l.position, l.weight, l.last_priority, l.last_sequence, l.look_at,
      l.admissible, l.keyed, l.group_key, l.cursors, l.policy, l.gate, l.pace
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.admissible
      and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    order by l.finish, l.position
    limit 1 + case when p_refill then p_budget else 0 end
  ),
  candidate as materialized (
    select c.*, fairq._rounds(c.finish - p_tick.clock) as tag,
      c.weight / coalesce(((c.pace).estimates[1]).seconds, 1) as width,
      row_number() over (order by c.admissible desc, c.finish, c.position) as nth
    from (
      select null::tid as replaces, r.lane_no, r.version, r.finish, r.position, r.weight, r.last_priority, r.last_sequence, r.look_at,
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
    select min(x.level) as level, least(min(x.level), min(x.fence)) as fenced, min(x.fence_nth) as fence_nth, min(x.reach) as reach
    from (
      select (p_budget + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as level,
        (p_take + sum(c.width * c.tag) over by_tag) / sum(c.width) over by_tag as reach, f.tag as fence, f.nth as fence_nth
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
      end as quota,
      (c.policy).rate_seconds is not null as is_rated,
      -- Where this pop ends, at most, for what it would have to take now.
      case
        when p_take = 0 or (c.finish, c.position) >= (v_last.block, v_last.position) then p_tick.clock
        else least(v_last.block + 1, p_tick.clock + least(4e18, ceil(w.reach * fairq._round()))::bigint)
      end as reach
    from candidate c
    left join water w on true
  ),
  found as materialized (
    select s.replaces, s.lane_no, s.version, s.finish, s.position, s.weight, s.last_priority, s.last_sequence, s.look_at, s.admissible,
      s.keyed, s.group_key, s.cursors, s.quota, s.policy, s.gate, s.pace, s.is_rated, k.tasks, k.expired, k.next, k.served, k.touched, k.meets_key, k.yields
    from share s
    left join lateral (
      select
        array_agg((n.id, s.finish + n.start, case when n.start = 0 then s.position else fairq._lane_position(s.lane_no) end, n.charge,
          fairq._counts(s.policy), n.keyed, n.priority, n.sequence, s.group_key, null)::fairq.placed) filter (where n.is_taken) as tasks,
        array_agg(n.id) filter (where n.is_expired and not n.is_next) as expired,
        (array_agg((n.priority, n.sequence, n.touched, n.is_open)::fairq.cursor) filter (where n.is_next))[1] as next,
        max(n.start + n.step) filter (where not n.is_next) as served,
        max(n.sequence) filter (where not n.is_next) as touched,
        bool_or(n.meets_key) as meets_key,
        bool_or(n.yields) as yields
      from (
        select t.*, not t.is_expired and not t.is_next as is_taken
        from (
          select y.*, (sum(y.step) over line - y.step)::bigint as start, bool_or(y.stops) over line or row_number() over line > s.quota as is_next
          from (
            select x.*
            from fairq._next_tasks(p_tick.shard_no, p_tick.queue, s.group_key, s.cursors, s.weight, s.pace, s.quota + 1, p_now) x
            where not s.keyed
            union all
            select x.*
            from fairq._take_keys(p_tick, s.group_key, s.cursors, s.weight, s.pace, s.quota, s.finish, s.reach, s.is_rated, p_now) x
            where s.keyed
          ) y
          window line as (order by y.priority desc, y.sequence rows unbounded preceding)
          limit s.quota + 1
        ) t
      ) n
    ) k on s.quota > 0
  ),
  cut as materialized (
    -- The address at which this pop ends.
    select a.block, a.position
    from (
      select r.block, r.position from unnest(p_ready) r
      union all
      select t.block, t.position
      from found f
      cross join lateral unnest(f.tasks) t
      where exists (select from found g where g.is_rated and g.quota > 0)
    ) a
    order by a.block, a.position
    offset greatest(p_take - 1, 0)
    limit 1
  ),
  chunk as materialized (
    select f.replaces, f.lane_no, f.version, f.finish, f.position, f.weight, f.last_priority, f.last_sequence, f.look_at, f.admissible,
      f.keyed or coalesce(f.meets_key, false) as keyed, f.group_key, f.cursors, f.quota, f.policy, f.touched, f.expired, coalesce(f.yields, false) as yields,
      case when f.policy is distinct from null then fairq._charge(f.policy, f.gate, coalesce(x.kept, 0), p_now) else f.gate end as gate,
      fairq._last_block(f.pace, (f.tasks[x.kept]).block) as pace,
      case when x.is_cut then f.tasks[1:x.kept] else f.tasks end as tasks,
      f.tasks[x.kept] as last,
      case when x.is_cut then (f.tasks[x.kept + 1]).block - f.finish else coalesce(f.served, 0) end as served,
      case
        when x.is_cut then ((f.tasks[x.kept + 1]).priority, (f.tasks[x.kept + 1]).sequence, null, false)::fairq.cursor
        else f.next
      end as next
    from found f
    cross join lateral (
      select c.kept, c.kept < coalesce(cardinality(f.tasks), 0) as is_cut
      from (
        select case
          when not f.is_rated or f.keyed or f.tasks is null then coalesce(cardinality(f.tasks), 0)
          when p_take = 0 then 0
          else (
            select count(*)::integer
            from unnest(f.tasks) t
            where (t.block, t.position) <= (coalesce((select u.block from cut u), 9223372036854775807), coalesce((select u.position from cut u), 0))
          )
        end as kept
        offset 0
      ) c
      offset 0
    ) x
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, keyed, policy, gate, pace, last_priority,
      last_sequence, cursors, look_at, admissible)
    select p_tick.shard_no, p_tick.queue, c.group_key, c.version + 1, c.lane_no, c.finish + c.served,
      case when (c.last).id is not null then fairq._lane_position(c.lane_no) else c.position end,
      c.weight, c.keyed, c.policy, c.gate, c.pace,
      coalesce((c.last).priority, c.last_priority), coalesce((c.last).sequence, c.last_sequence),
      -- Higher priorities are used up, the level of the next task begins with it, lower ones are untouched. Written out here:
      -- a function with a subquery would cost an executor start for every lane.
      case
        when c.quota = 0 then c.cursors
        when (c.next).sequence is null then '{}'
        when cardinality(c.cursors) = 1 and not (c.cursors[1]).is_open
          then array[((c.next).priority, (c.next).sequence, greatest((c.cursors[1]).touched, c.touched), false)::fairq.cursor]
        else fairq._advance_cursors(c.cursors, c.next, c.touched)
      end,
      case when c.quota = 0 then c.look_at when (c.next).sequence is not null then (a.allowance).look_at end,
      case when c.quota = 0 then c.admissible else (c.next).sequence is not null and not c.yields and (c.policy is null or (a.allowance).tasks > 0) end
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
  select (select greatest(p_tick.top, max(c.finish + c.served)) from chunk c),
    (select h.finish from horizon h), (select h.position from horizon h),
    (select array_agg(e.id) from chunk c cross join lateral unnest(c.expired) e(id)),
    (select array_agg(c.replaces) from chunk c where c.replaces is not null and c.quota > 0),
    (select array_agg(t order by t.block, t.position)
      from chunk c
      cross join lateral unnest(c.tasks) t),
    (select max(c.touched) from chunk c), (select bool_or(c.keyed) from chunk c)
  into o_tick.top, o_tick.horizon, o_tick.horizon_position, o_expired, v_replaced, o_placed, v_touched, v_keyed;

  o_tick.top := coalesce(o_tick.top, p_tick.top);
  o_tick.touched := greatest(p_tick.touched, v_touched);
  o_tick.keyed := p_tick.keyed or coalesce(v_keyed, false);
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;

-- The next tasks of a lane none of whose tasks is known to have a concurrency key, in order of priority and of becoming runnable; of each level p_limit
-- at most. At one that has a key the lane stops: it committed after its ring was looked for, and without its key nothing may be done with it.
-- Behind a cursor's touched everything waits; up to it a look-up by id tells what is ready, held or parked.
-- One statement, stable, without "set search_path": so it is inlined into _admit, and costs no executor start for every lane.
-- Cost: tasks_line_idx from the cursors.
create function fairq._next_tasks(
  p_shard_no integer, p_queue text, p_group_key text, p_cursors fairq.cursor[], p_weight double precision, p_pace fairq.pace, p_limit integer,
  p_now timestamptz
) returns table (id bigint, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, keyed boolean, stops boolean,
  meets_key boolean, yields boolean, touched bigint, is_open boolean)
language sql stable as $$
  select o.id, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end, false, o.meets_key, o.meets_key, false, c.touched, c.is_open
  from unnest(p_cursors) c
  cross join lateral (
    select t.id, t.priority, t.sequence, t.cost, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      case when p_pace is distinct from null then fairq._expected(p_pace, t.kind, t.cost) end as charge,
      t.concurrency_key is not null as meets_key
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.queue = p_queue and t.group_key = p_group_key and not t.scheduled and t.priority = c.priority
      and t.sequence >= c.sequence
      and (t.sequence > c.touched or fairq._is_waiting(p_shard_no, t.id))
    order by t.sequence
    limit p_limit
  ) o
  union all
  -- Only a lane with more levels than it keeps cursors for: "offset 0" is the gate.
  select o.id, o.priority, o.sequence, o.is_expired, o.charge,
    case when o.is_expired then 0 else fairq._step(coalesce(o.charge, o.cost), p_weight) end, false, o.meets_key, o.meets_key, false, c.touched, true
  from (select l.* from unnest(p_cursors) l where l.is_open offset 0) c
  cross join lateral (
    select t.id, t.priority, t.sequence, t.cost, t.expires_at is not null and t.expires_at <= p_now as is_expired,
      case when p_pace is distinct from null then fairq._expected(p_pace, t.kind, t.cost) end as charge,
      t.concurrency_key is not null as meets_key
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.queue = p_queue and t.group_key = p_group_key and not t.scheduled and t.priority < c.priority
      and (t.sequence > c.touched or fairq._is_waiting(p_shard_no, t.id))
    order by t.priority desc, t.sequence
    limit p_limit
  ) o
$$;

-- Whether a task in line waits: nobody has it, and it is neither ready nor parked.
-- "offset 0" keeps each of these a look-up of one id: as an anti join it could become a walk through all of the table.
create function fairq._is_waiting(p_shard_no integer, p_id bigint) returns boolean
language sql stable as $$
  select not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = p_id offset 0)
    and not exists (select from fairq.ready r where r.shard_no = p_shard_no and r.id = p_id offset 0)
    and not exists (select from fairq.parked k where k.shard_no = p_shard_no and k.id = p_id offset 0)
$$;

-- The cursors of a lane of several levels once its tasks before p_next are taken, up to the sequence p_taken.
create function fairq._advance_cursors(p_cursors fairq.cursor[], p_next fairq.cursor, p_taken bigint) returns fairq.cursor[]
language sql immutable as $$
  select array_agg(
    case
      when u.is_open and u.priority >= p_next.priority then (p_next.priority, p_next.sequence, greatest(u.touched, p_taken), true)::fairq.cursor
      when u.priority = p_next.priority then (u.priority, p_next.sequence, greatest(u.touched, p_taken), u.is_open)::fairq.cursor
      else u
    end order by u.priority desc)
  from unnest(p_cursors) u
  where u.is_open
    or u.priority <= p_next.priority
$$;

-- sql/promote/hear.sql

-- Which rings are new, said once: those of transactions at or past the tick's next_xid, and of those that were pending then, visible now, and not
-- heard in part before. In the order of their transactions, at most p_limit.
-- One look-up per pending transaction, and only when it has ended: one that holds a million rings and stays open costs nothing. The transaction
-- that promoted last may have rung a million itself: it is stepped over, not walked through.
-- Stable, without "set search_path": inlined into the statement that asks, so that rings and snapshot are of one moment.
create function fairq._new_rings(p_tick fairq.ticks, p_limit integer) returns setof fairq.rings
language sql stable as $$
  select n.*
  from (
    select r.*
    from unnest(p_tick.pending) p
    cross join lateral (
      select w.*
      from fairq.rings w
      where w.shard_no = p_tick.shard_no and w.queue = p_tick.queue and w.xid = p.xid and w.ring_id > p.ring_id
      order by w.ring_id
      limit p_limit
    ) r
    where pg_visible_in_snapshot(p.xid, pg_current_snapshot())
    union all
    select c.*
    from (
      select w.*
      from fairq.rings w
      where w.shard_no = p_tick.shard_no and w.queue = p_tick.queue and w.xid >= p_tick.next_xid and w.xid < p_tick.heard_xid
      order by w.xid, w.ring_id
      limit p_limit
    ) c
    union all
    select b.*
    from (
      select w.*
      from fairq.rings w
      where w.shard_no = p_tick.shard_no and w.queue = p_tick.queue and w.xid = p_tick.heard_xid and w.xid >= p_tick.next_xid
        and w.ring_id > p_tick.heard_ring
      order by w.ring_id
      limit p_limit
    ) b
    union all
    select d.*
    from (
      select w.*
      from fairq.rings w
      where w.shard_no = p_tick.shard_no and w.queue = p_tick.queue and w.xid >= p_tick.next_xid and w.xid > p_tick.heard_xid
      order by w.xid, w.ring_id
      limit p_limit
    ) d
  ) n
  limit p_limit
$$;

-- Whether a promotion would find something: a ring, a scheduled task that is due, bodies to announce after a rebuild, a concurrency key that came free.
-- Takes no lock, writes nothing.
create function fairq._has_news(p_tick fairq.ticks) returns boolean
language plpgsql set search_path = '' as $$
begin
  return coalesce(p_tick.next_due_at <= fairq._now(), false)
    or p_tick.announce_from is not null
    or exists (select from fairq._new_rings(p_tick, 1))
    or (p_tick.keyed and exists (select from fairq._tick(p_tick.shard_no, '#keys') k where fairq._has_news(k)));
end;
$$;

-- As many rings as a pass should hear: five thousand, for each may bring a lane of its own. Where they come from few groups, as those of ten thousand tasks
-- that one tenant created one by one, four times as many: whoever comes behind them is heard, too.
create function fairq._hear_enough(p_tick fairq.ticks, out o_tick fairq.ticks, out o_news fairq.news[], out o_cancelled bigint[])
language plpgsql set search_path = '' as $$
declare
  v_heard record;
begin
  select h.* into v_heard from fairq._hear(p_tick, 5000) h;
  if cardinality(v_heard.o_news) < 500 and exists (select from fairq._new_rings(v_heard.o_tick, 1)) then
    select h.* into v_heard from fairq._hear(p_tick, 20000) h;
  end if;
  o_tick := v_heard.o_tick;
  o_news := v_heard.o_news;
  o_cancelled := v_heard.o_cancelled;
end;
$$;

-- Turns the new rings into one row per group, and the tick into one that has heard them. Nothing else.
--
-- Exactly once, without deleting or marking a ring: what is visible and what the next tick remembers come from the snapshot of one statement. Two
-- snapshots would hear a ring twice or never, and a ring that tells of freed places may not be heard twice.
-- The own transaction is a case of its own: no snapshot lists it as pending, and its id may lie above or below the snapshot's xmax. Its rings are heard
-- up to here, and the tick says up to which.
-- When p_limit rings were read there may be more: then the tick stops at the last of them, in the middle of a transaction if need be.
-- Cost: p_limit entries of rings_xid_idx.
create function fairq._hear(p_tick fairq.ticks, p_limit integer, out o_tick fairq.ticks, out o_news fairq.news[], out o_cancelled bigint[])
language plpgsql set search_path = '' as $$
declare
  v_own xid8 := pg_current_xact_id();
  v_own_ring bigint;
  v_snapshot pg_snapshot;
  v_count integer;
  v_last bigint[];
  v_last_xid xid8;
  v_due_at timestamptz;
begin
  with ring as materialized (
    select r.* from fairq._new_rings(p_tick, p_limit) r
  ),
  news as (
    select r.group_key, sum(r.freed)::integer as freed,
      coalesce(sum(r.failures) filter (where r.ring_id >= r.last_success), 0)::integer as failures,
      bool_or(r.succeeded) as succeeded, bool_or(r.keyed) as keyed, bool_or(r.configured) as configured, min(r.sequence) as first_sequence,
      array_agg((r.priority, r.sequence, null, false)::fairq.cursor) filter (where r.sequence is not null) as heard,
      sum(r.correction) as correction, array_agg(r.ran) filter (where (r.ran).kind is not null) as ran
    from (
      select g.*, coalesce(max(g.ring_id) filter (where g.succeeded) over (partition by g.group_key), 0) as last_success
      from ring g
      where g.due_at is null
    ) r
    group by r.group_key
  )
  select pg_current_snapshot(), (select count(*)::integer from ring), (select max(array[r.xid::text::bigint, r.ring_id]) from ring r),
    (select max(r.ring_id) from ring r where r.xid = v_own), (select min(r.due_at) from ring r),
    (select array_agg(r.cancelled_id) from ring r where r.cancelled_id is not null),
    (select array_agg((n.group_key, n.freed, n.failures, n.succeeded, n.keyed, n.configured, n.first_sequence, n.heard, n.correction, n.ran)::fairq.news)
      from news n)
  into v_snapshot, v_count, v_last, v_own_ring, v_due_at, o_cancelled, o_news;

  o_tick := p_tick;
  o_tick.next_due_at := least(p_tick.next_due_at, v_due_at);
  v_own_ring := coalesce(v_own_ring, case when p_tick.heard_xid = v_own then p_tick.heard_ring end,
    (select p.ring_id from unnest(p_tick.pending) p where p.xid = v_own), 0);
  v_last_xid := v_last[1]::text::xid8;

  if v_count >= p_limit and v_last_xid < p_tick.next_xid then
    -- Cut among the transactions that were pending: those behind it, and those still running, stay so.
    o_tick.pending := array(
      select (p.xid, case p.xid when v_last_xid then v_last[2] when v_own then v_own_ring else p.ring_id end)::fairq.heard
      from unnest(p_tick.pending) p
      where p.xid >= v_last_xid
        or p.xid = v_own
        or not pg_visible_in_snapshot(p.xid, v_snapshot)
      order by p.xid
    );
    return;
  end if;

  if v_count >= p_limit then
    -- Never past the snapshot's xmax, see below: only the own transaction can lie there.
    o_tick.next_xid := least((v_last[1] + 1)::text::xid8, pg_snapshot_xmax(v_snapshot));
    if v_last_xid >= o_tick.next_xid then
      o_tick.heard_xid := v_last_xid;
      o_tick.heard_ring := v_last[2];
    elsif p_tick.heard_xid < o_tick.next_xid then
      o_tick.heard_xid := '0';
      o_tick.heard_ring := 0;
    end if;
  else
    -- Never past the snapshot's xmax: the own transaction may lie beyond it, and between the two others that nobody lists as pending.
    o_tick.next_xid := pg_snapshot_xmax(v_snapshot);
    v_last_xid := null;
    o_tick.heard_xid := case when v_own >= o_tick.next_xid then v_own else '0' end;
    o_tick.heard_ring := case when v_own >= o_tick.next_xid then v_own_ring else 0 end;
  end if;
  o_tick.pending := array(
    select (p.xid, case p.xid when v_last_xid then v_last[2] when v_own then v_own_ring else 0 end)::fairq.heard
    from (select pg_snapshot_xip(v_snapshot) union select v_own union select v_last_xid) p(xid)
    where p.xid < o_tick.next_xid
    order by p.xid
  );
end;
$$;

-- sql/promote/move_clock.sql

-- The clock moves to the address of the first task still ready or still waiting, whichever is first. A pop in flight counts as ready, so what it puts back
-- lies at or after the clock. With nothing left the clock goes to the end of the busy period, the highest finish tag, so nobody pays for the past.
-- clock_position is the lower bound of scans inside the block: right after the lane before the next one, so the dead rows of the lanes already
-- served lie behind it; newcomers get the positions in between, one after the other.
create function fairq._move_clock(p_tick fairq.ticks, p_block bigint, p_position bigint) returns fairq.ticks
language plpgsql immutable set search_path = '' as $$
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

-- Takes the clock back to zero long before a bigint is full: blocks, finish tags and the tick move by the same distance, so the order stays as it is. With tasks of
-- cost 1 that is after 2^41 rounds; with bytes for costs it may happen in a few years.
-- Pops that read the tick before find nothing and look again.
-- Returns the tick, not yet written.
-- Locks: ready (a pop in flight is waited for); lanes; the caller holds the domain.
-- Cost: the ready set and all lanes of the domain.
create function fairq._rebase(p_tick fairq.ticks, p_clock bigint) returns fairq.ticks
language plpgsql set search_path = '' as $$
begin
  update fairq.ready t
  set block = t.block - p_clock
  where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.position >= 0;
  update fairq.lanes l
  set finish = greatest(0, l.finish - p_clock),
    pace = case when l.pace is distinct from null then ((l.pace).last_block - p_clock, (l.pace).credit, (l.pace).estimates)::fairq.pace end
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue;
  delete from fairq.sweeps w where w.shard_no = p_tick.shard_no and w.what = 'lanes ' || p_tick.queue;

  p_tick.clock := 0;
  p_tick.top := p_tick.top - p_clock;
  p_tick.horizon := p_tick.horizon - p_clock;
  p_tick.refill_block := p_tick.refill_block - p_clock;
  return p_tick;
end;
$$;

-- sql/promote/promote_overflow.sql

-- Promotes a queue, in all its shards: hears new rings and refills the ready set if it is short. pop_tasks does this by itself when it has to.
-- Returns the number of tasks that became ready.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED, QF007 bad limit.
-- Locks: the domain, waits for it (see 030_tables.sql); held until the transaction ends.
create function fairq.promote_overflow(p_queue text default 'default', p_limit integer default null, p_shard_no integer default null)
returns integer
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_queue fairq.queues;
  v_shard_no integer;
  v_promoted integer := 0;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_queue and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  if p_limit is not null then
    perform fairq._check_limit(p_limit);
  end if;

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    v_promoted := v_promoted + (fairq._promote(v_shard_no, p_queue, coalesce(p_limit, fairq._ready_target(v_shard_no, v_queue)), true)).o_promoted;
  end loop;
  return v_promoted;
end;
$$;
comment on function fairq.promote_overflow is 'Hears new rings and moves waiting tasks into the served order. pop_tasks does this when it has to.';

-- Promotion of one domain, top to bottom. Tick in, tick out.
-- p_take tasks are handed over to the pop that calls it: o_popped, in served order, some of them from the ready set. The rest of the pass becomes ready.
-- p_used_up is the tick whose ready set the caller found used up: what is still ready before the horizon is being popped by others, and a pop
-- in flight, or one whose client hangs, must not keep the rest waiting. Who promoted since has seen to it: callers that waited for the lock
-- would each add another ready set.
-- o_goes_on: it ended expired tasks, or rang lanes, and another pass may find what was behind them.
-- Returns null when another session is at it and p_wait is false.
-- Raises QF003, QF005 (see _lock_domain).
-- Locks: domains, then what the parts say; all until the end of the transaction.
-- Killed anywhere, the transaction rolls back and the next promotion starts from the last committed tick.
create function fairq._promote(
  p_shard_no integer, p_queue text, p_limit integer, p_wait boolean, p_used_up bigint default null, p_take integer default 0, out o_promoted integer,
  out o_popped fairq.placed[], out o_goes_on boolean
)
language plpgsql set search_path = '' as $$
declare
  v_now timestamptz;
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_read fairq.ticks;
  v_first record;
  v_heard record;
  v_settled record;
  v_lanes fairq.lanes[];
  v_ready fairq.placed[] := array[]::fairq.placed[];
  v_rest fairq.placed[];
  v_room integer;
  v_is_short boolean;
  v_refill boolean;
  v_horizon fairq.placed;
  v_done record;
begin
  if not fairq._lock_domain(p_shard_no, p_queue, p_wait) then
    return;
  end if;
  v_now := fairq._now();
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if v_tick.tick is null then
    v_tick := fairq._start_anew(p_shard_no, p_queue);
  end if;
  v_read := v_tick;

  -- What rings by itself comes first, for the rings of this transaction are heard below: bodies after a rebuild, keys that came free, what is due.
  v_tick := fairq._announce_bodies(v_tick);
  if v_tick.keyed then
    if not fairq._lock_keys(p_shard_no, p_wait) then
      return;
    end if;
    perform fairq._open_keys(p_shard_no, v_now);
  end if;
  v_tick.next_due_at := fairq._wake_due(v_tick, v_now, greatest(p_limit, 1000));

  -- The clock: the first task still ready, one that is being popped counts, too. With the horizon it says what is being served.
  select f.o_block as block, f.o_position as position into v_first from fairq._first_ready(v_tick) f;
  v_tick := fairq._move_clock(v_tick, v_first.block, v_first.position);
  if v_tick.clock > 2305843009213693952 then
    v_first.block := v_first.block - v_tick.clock;
    v_tick := fairq._rebase(v_tick, v_tick.clock);
  end if;

  -- Hearing writes nothing: it may be done again, and who cannot have the keys that he hears of now leaves it at that.
  v_heard := fairq._hear_enough(v_tick);
  if (v_heard.o_tick).next_due_at <= v_now then
    -- A schedule heard of now that is due already: what it wakes belongs into this pass, before younger tasks.
    v_tick.next_due_at := (v_heard.o_tick).next_due_at;
    v_tick.next_due_at := fairq._wake_due(v_tick, v_now, greatest(p_limit, 1000));
    v_heard := fairq._hear_enough(v_tick);
  end if;
  if not v_tick.keyed and exists (select from unnest(v_heard.o_news) n where n.keyed) then
    if not fairq._lock_keys(p_shard_no, p_wait) then
      return;
    end if;
    perform fairq._open_keys(p_shard_no, v_now);
  end if;
  select s.* into v_settled from fairq._settle_lanes(v_heard.o_tick, v_queue, v_heard.o_news, v_now) s;
  v_tick := v_settled.o_tick;
  v_lanes := fairq._recall(v_tick, v_settled.o_lanes, v_heard.o_news, v_heard.o_cancelled, v_now);
  if v_heard.o_cancelled is not null then
    perform fairq._cancel_waiting(p_shard_no, v_heard.o_cancelled, v_now);
  end if;

  -- Ready tasks this pop may take, in order; those beyond the horizon only if it moves.
  if p_take > 0 then
    v_ready := fairq._pick(v_tick, p_take, false);
  end if;
  v_room := p_take - (
    select count(*)::integer
    from unnest(v_ready) r
    where (r.block, r.position) < (coalesce(v_tick.horizon, 9223372036854775807), coalesce(v_tick.horizon_position, 0))
  );

  -- The ready set is short when it has not enough for this pop, when pops have passed its middle, or stand at the horizon, which may lie before it: a
  -- lane of cheap tasks gets as many tasks as the others and comes less far. Then it gets p_limit more; when nothing waits for that many, what comes later
  -- goes on filling it. Otherwise only the lanes just rung are looked at, and only for what comes before the horizon, or before the end of a ready set
  -- that is full.
  v_is_short := v_room > 0 or coalesce(p_used_up = v_read.tick, false) or v_first.block is null or v_tick.refill_block is null
    or (v_first.block, v_first.position) >= (v_tick.refill_block, v_tick.refill_position)
    or coalesce((v_first.block, v_first.position) >= (v_tick.horizon, v_tick.horizon_position), false);
  v_tick.filled := case when v_is_short then 0 else v_tick.filled end;
  if v_is_short and p_take > 0 and v_queue.ready_target is null and v_queue.fairness = 'count' then
    p_limit := greatest(p_limit, fairq._worth_a_lane(v_tick, cardinality(v_settled.o_lanes), p_take) - p_take);
  end if;
  v_refill := v_is_short or (v_tick.horizon is null and v_tick.filled < p_limit);
  if v_tick.horizon is null and not v_refill then
    v_tick.horizon := v_tick.top;
    v_tick.horizon_position := -9223372036854775808;
  end if;
  v_horizon.block := v_tick.horizon;
  v_horizon.position := v_tick.horizon_position;
  select a.* into v_done
  from fairq._admit(v_tick, v_lanes, v_refill, case when v_refill then greatest(1, p_limit + v_room - v_tick.filled) else greatest(1000, p_limit, p_take) end,
    p_take, v_ready, v_now) a;
  v_tick := v_done.o_tick;
  o_goes_on := v_done.o_expired is not null;
  if o_goes_on then
    perform fairq._end_tasks(p_shard_no, v_done.o_expired, 'expired', null, v_now);
  end if;
  if v_tick.keyed then
    perform fairq._take_keys_back(p_shard_no, p_queue, v_now);
  end if;

  -- The first p_take of all that is ready before the new horizon go to the pop, the rest of the pass becomes ready.
  select m.popped, m.rest into o_popped, v_rest
  from fairq._merge(v_ready, v_done.o_placed, p_take, v_tick.horizon, v_tick.horizon_position) m;
  perform fairq._place(v_tick, v_rest);
  o_promoted := coalesce(cardinality(v_done.o_placed), 0);

  -- Where pops will have passed the middle of what is ready.
  if v_is_short or (o_promoted > 0 and (v_tick.horizon, v_tick.horizon_position) < (v_horizon.block, v_horizon.position)) then
    v_tick.refill_block := coalesce((v_rest[cardinality(v_rest) / 2 + 1]).block, v_tick.horizon);
    v_tick.refill_position := case when v_rest <> '{}' then (v_rest[cardinality(v_rest) / 2 + 1]).position else v_tick.horizon_position end;
  end if;
  v_tick.filled := v_tick.filled + coalesce(cardinality(v_rest), 0);
  v_tick.next_due_at := least(v_tick.next_due_at, fairq._next_look(v_read, v_now));

  -- A refill that did not get past the first lane: the server's clock was set back, and who had room by a rate or a breaker has none now. Those lanes
  -- look again, or everyone behind would wait with them.
  if v_refill and o_promoted = 0 and (v_tick.horizon, v_tick.horizon_position) = (v_horizon.block, v_horizon.position) then
    o_goes_on := o_goes_on or fairq._look_again(v_tick, p_limit, v_now);
  end if;
  perform fairq._write_tick(v_tick);
end;
$$;

-- The first task that is ready. For enable_sort see _pick.
create function fairq._first_ready(p_tick fairq.ticks, out o_block bigint, out o_position bigint)
language sql set search_path = '' set enable_sort = off as $$
  select r.block, r.position
  from fairq.ready r
  where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
    and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
  order by r.block, r.position
  limit 1
$$;

-- Ready tasks in served order, locked for the caller, at most p_limit; with p_before_horizon only those that may be popped as things stand.
-- A row that another session pops is skipped; one that another session popped after our snapshot is gone at the second look and is skipped too; one
-- whose popper rolls back becomes visible again at the same address.
-- enable_sort is off: the rows come in the order of an index. To a table that was analyzed while it was empty, another index with a sort behind it
-- looks cheaper, and reads all of it.
create function fairq._pick(p_tick fairq.ticks, p_limit integer, p_before_horizon boolean) returns fairq.placed[]
language plpgsql set search_path = '' set enable_sort = off as $$
begin
  return coalesce((
    select array_agg((n.id, n.block, n.position, n.charge, n.counted, n.keyed, n.priority, n.sequence, n.group_key, n.ctid)::fairq.placed)
    from (
      select r.ctid, r.id, r.block, r.position, r.charge, r.counted, r.keyed, r.priority, r.sequence, r.group_key
      from fairq.ready r
      where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
        and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
        and (r.block, r.position) < (
          case when p_before_horizon then coalesce(p_tick.horizon, 9223372036854775807) else 9223372036854775807 end, coalesce(p_tick.horizon_position, 0))
      order by r.block, r.position
      limit p_limit
      for update skip locked
    ) n
  ), '{}');
end;
$$;

-- Ready tasks and those just given an address, in served order: the first p_take before the horizon are popped, of the others the new ones become ready.
create function fairq._merge(p_ready fairq.placed[], p_placed fairq.placed[], p_take integer, p_horizon bigint, p_horizon_position bigint)
returns table (popped fairq.placed[], rest fairq.placed[])
language plpgsql immutable rows 1 set search_path = '' as $$
begin
  -- Most often one of the two is all there is, and in order already.
  if p_take = 0 then
    return query select '{}'::fairq.placed[], coalesce(p_placed, '{}');
  elsif p_ready = '{}' and p_horizon is null then
    return query select coalesce(p_placed[1:p_take], '{}'), coalesce(p_placed[p_take + 1:], '{}');
  else
    return query
      select
        coalesce(array_agg(m.task order by m.nth) filter (where m.is_popped), '{}'),
        coalesce(array_agg(m.task order by m.nth) filter (where not m.is_popped and m.is_new), '{}')
      from (
        select a.task, a.is_new, a.nth,
          a.nth <= p_take and ((a.task).block, (a.task).position) < (coalesce(p_horizon, 9223372036854775807), coalesce(p_horizon_position, 0)) as is_popped
        from (
          select u.task, u.is_new, row_number() over (order by (u.task).block, (u.task).position) as nth
          from (
            select r as task, false as is_new from unnest(p_ready) r
            union all
            select n as task, true as is_new from unnest(p_placed) n
          ) u
        ) a
      ) m;
  end if;
end;
$$;

-- Puts tasks with an address into the ready set.
create function fairq._place(p_tick fairq.ticks, p_tasks fairq.placed[]) returns void
language plpgsql set search_path = '' as $$
begin
  if p_tasks <> '{}' then
    insert into fairq.ready (shard_no, queue, id, block, position, charge, counted, keyed, priority, sequence, group_key)
    select p_tick.shard_no, p_tick.queue, t.id, t.block, t.position, t.charge, t.counted, t.keyed, t.priority, t.sequence, t.group_key
    from unnest(p_tasks) t;
  end if;
end;
$$;

-- How many tasks make it worth to write the lanes they come from: eight of each that waits, four thousand at most; p_take, where those are four of each
-- already. A lane costs as much as four tasks that become ready first, so where a thousand groups wait, taking one task from each would be mostly lanes.
-- Cost: five hundred entries of lanes_order_idx.
create function fairq._worth_a_lane(p_tick fairq.ticks, p_rung integer, p_take integer) returns integer
language plpgsql stable set search_path = '' as $$
declare
  v_lanes integer := p_rung + (
    select count(*)::integer
    from (
      select
      from fairq.lanes l
      where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.admissible
        and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
      order by l.finish, l.position
      limit 500
    ) w
  );
begin
  return case when p_take >= 4 * v_lanes then p_take else least(4000, 8 * v_lanes) end;
end;
$$;

-- When lanes that a rate or a breaker holds back want to be looked at; of those that are due now this pass may have taken a part.
create function fairq._next_look(p_tick fairq.ticks, p_now timestamptz) returns timestamptz
language plpgsql stable set search_path = '' as $$
begin
  return (
    select l.look_at
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue
      and l.look_at >= least(p_tick.next_due_at, p_now)
    order by l.look_at
    limit 1
  );
end;
$$;

-- Rings lanes that had room when they were written and have none now.
create function fairq._look_again(p_tick fairq.ticks, p_limit integer, p_now timestamptz) returns boolean
language plpgsql set search_path = '' as $$
begin
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.admissible
    and l.policy is distinct from null
    and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    and (fairq._allowance(l.policy, l.gate, p_now)).tasks < 1
  order by l.finish, l.position
  limit greatest(p_limit, 100);
  return found;
end;
$$;

-- Lanes that a rate or a breaker held back until now ring. Scheduled tasks that are due stand in line from now on, behind what their groups have
-- waiting, and ring; one that was tried before keeps its old place.
-- Returns when the next one is due.
-- Locks: tasks, the scheduled rows it moves, "skip locked": retry_task in somebody's open transaction may hold one, and is not waited for.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns timestamptz
language plpgsql set search_path = '' as $$
declare
  v_ctids tid[];
begin
  if p_tick.next_due_at is null or p_tick.next_due_at > p_now then
    return p_tick.next_due_at;
  end if;
  insert into fairq.rings (shard_no, queue, group_key)
  select p_tick.shard_no, p_tick.queue, l.group_key
  from fairq.lanes l
  where l.shard_no = p_tick.shard_no and l.queue = p_tick.queue and l.look_at >= p_tick.next_due_at and l.look_at <= p_now
  order by l.look_at
  limit p_limit;

  v_ctids := array(
    select t.ctid
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.scheduled and t.run_at >= p_tick.next_due_at and t.run_at <= p_now
    order by t.run_at
    limit p_limit
    for update skip locked
  );
  if v_ctids <> '{}' then
    perform fairq._wake(p_tick.shard_no, p_tick.queue, v_ctids);
  end if;
  return (
    select t.run_at
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.scheduled and t.run_at >= p_tick.next_due_at
    order by t.run_at
    limit 1
  );
end;
$$;

-- By ctid and no other way, see _leave.
create function fairq._wake(p_shard_no integer, p_queue text, p_ctids tid[]) returns void
language plpgsql set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
begin
  with numbered as materialized (
    select d.ctid, nextval('fairq.task_ids') as sequence from unnest(p_ctids) d(ctid)
  ),
  woken as (
    update fairq.tasks t
    set scheduled = false, sequence = case when t.attempt = 0 then n.sequence else t.sequence end
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

-- sql/promote/recall.sql

-- Takes ready tasks of lanes out of the order again, because what made them ready does not hold any more: a task came, or came back, that is before them in
-- its group; the group was paused, its breaker opened, its cap or any other limit of it changed; one of them is to be cancelled.
-- The lane goes back to the earliest address that came free, so admission hands out the same addresses again, in order. What they were charged
-- is given back. A task that is being popped right now is locked, and keeps its address.
-- Where groups share time, finish tag and charges may differ by what corrections said since: that stays a debt or becomes credit. Otherwise
-- a group would be forgiven an hour by cancelling one task.
-- Returns the lanes as they are afterwards.
-- Locks: ready, "skip locked".
-- Cost: the ready set, from the clock on, and only when there is something to recall.
create function fairq._recall(
  p_tick fairq.ticks, p_lanes fairq.lanes[], p_news fairq.news[], p_cancelled bigint[], p_now timestamptz
) returns fairq.lanes[]
language plpgsql set search_path = '' as $$
declare
  v_configured text[] := array(select n.group_key from unnest(p_news) n where n.configured);
  v_whole text[];
  v_groups text[];
  v_before fairq.cursor[];
begin
  v_whole := case when p_cancelled is not null then v_configured || fairq._groups_of_ready(p_tick.shard_no, p_cancelled) else v_configured end;
  select array_agg(l.group_key), array_agg(case when not w.is_whole then l.cursors[1] end) into v_groups, v_before
  from unnest(p_lanes) l
  cross join lateral (
    select l.group_key = any(v_whole)
      or coalesce((l.policy).paused_at is not null or (l.gate).open_until > p_now
        or (l.gate).in_flight + coalesce((l.gate).uncounted, 0) > (l.policy).max_running, false) as is_whole
  ) w
  where l.finish > p_tick.clock
    and (w.is_whole or (-(l.cursors[1]).priority, (l.cursors[1]).sequence) < (-l.last_priority, l.last_sequence));
  if v_groups is not null then
    p_lanes := fairq._recall_groups(p_tick, p_lanes, v_groups, v_before, p_now);
  end if;
  if exists (select from unnest(p_lanes) l where (l.gate).uncounted > 0 or (l.group_key = any(v_configured) and fairq._counts(l.policy))) then
    p_lanes := fairq._adopt(p_tick, p_lanes, v_configured, p_now);
  end if;
  return p_lanes;
end;
$$;

-- Takes ready tasks of groups out of the order again.
create function fairq._recall_groups(p_tick fairq.ticks, p_lanes fairq.lanes[], p_groups text[], p_before fairq.cursor[], p_now timestamptz)
returns fairq.lanes[]
language plpgsql set search_path = '' as $$
declare
  v_ctids tid[];
  v_keyed bigint[];
  v_lanes fairq.lanes[];
begin
  with back as materialized (
    select r.ctid, r.id, r.keyed, r.group_key, r.priority, r.sequence, r.block, r.position, r.counted, coalesce(r.charge, t.cost) as charge
    from fairq.ready r
    cross join lateral (select b.cost from fairq.tasks b where b.shard_no = p_tick.shard_no and b.id = r.id offset 0) t
    where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0
      and (r.block, r.position) >= (p_tick.clock, p_tick.clock_position)
      and r.group_key = any(p_groups)
      and (-r.priority, r.sequence) > coalesce((
        select (-b.priority, b.sequence) from unnest(p_before[array_position(p_groups, r.group_key):array_position(p_groups, r.group_key)]) b
        where b.priority is not null
      ), (-2147483648, 0::bigint))
    for update of r skip locked
  ),
  level as (
    select b.group_key, b.priority, min(b.sequence) as sequence, min(b.block) as block, min(array[b.block, b.position]) as address,
      count(*) as tasks, count(*) filter (where b.counted) as counted, sum(b.charge) as charge
    from back b
    group by b.group_key, b.priority
  ),
  freed as materialized (
    select l.group_key, min(l.block) as block, (min(l.address))[2] as position, sum(l.tasks)::integer as tasks, sum(l.counted)::integer as counted,
      sum(l.charge) as charge, array_agg((l.priority, l.sequence, null, false)::fairq.cursor) as cursors
    from level l
    group by l.group_key
  )
  select (select array_agg(b.ctid) from back b), (select array_agg(b.id) filter (where b.keyed) from back b), coalesce(array_agg(
    case
      when f.group_key is null then l
      else (l.shard_no, l.last_priority, l.last_sequence, l.lane_no, l.version, greatest(f.block, f.due),
        case when f.due > f.block then fairq._lane_position(l.lane_no) else f.position end, l.weight, (f.allowance).look_at,
        l.policy is null or (f.allowance).tasks > 0, l.keyed, l.queue, l.group_key,
        fairq._merge_cursors(l.cursors, f.cursors, p_tick.touched), l.policy, f.gate,
        case when l.pace is distinct from null then (f.block - 1, (l.pace).credit + greatest(0, f.block - f.due), (l.pace).estimates)::fairq.pace end
      )::fairq.lanes
    end), '{}')
  into v_ctids, v_keyed, v_lanes
  from unnest(p_lanes) l
  left join lateral (
    select d.group_key, d.block, d.position, d.cursors, x.gate,
      -- Where the lane stands without these tasks. Each step was rounded up, by less than a unit.
      case when l.pace is distinct from null then l.finish - d.tasks - least(fairq._round() * d.charge / l.weight, 4e18)::bigint else d.block end as due,
      case when l.policy is distinct from null then fairq._allowance(l.policy, x.gate, p_now) end as allowance
    from freed d
    cross join lateral (
      select fairq._uncharge(l.policy, l.gate, d.tasks, d.counted) as gate
      offset 0
    ) x
    where d.group_key = l.group_key
  ) f on true;

  if v_ctids is not null then
    perform fairq._remove(p_tick.shard_no, 'ready', v_ctids);
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select p_tick.shard_no, '#keys', t.concurrency_key, count(*)
    from unnest(v_keyed) k(id)
    cross join lateral (select b.concurrency_key from fairq.tasks b where b.shard_no = p_tick.shard_no and b.id = k.id offset 0) t
    group by t.concurrency_key;
  end if;
  return v_lanes;
end;
$$;

-- Tasks held by groups that get their first limit are counted from now on, and their lanes know of the places taken. A task that is being finished, or
-- popped, is locked, and nobody waits for it with the domain in hand: it takes a place all the same, as one that is not counted yet, until it is
-- gone or can be counted. Its lane looks again soon.
-- Locks: held, "skip locked". Cost: all held tasks of the shard. For settings, not for the hot path.
create function fairq._adopt(p_tick fairq.ticks, p_lanes fairq.lanes[], p_configured text[], p_now timestamptz) returns fairq.lanes[]
language plpgsql set search_path = '' as $$
declare
  v_groups text[] := array(
    select l.group_key from unnest(p_lanes) l
    where fairq._counts(l.policy) and ((l.gate).uncounted > 0 or l.group_key = any(p_configured))
  );
  v_ids bigint[];
  v_lane fairq.lanes;
  v_lanes fairq.lanes[] := array[]::fairq.lanes[];
  v_allowance fairq.allowance;
  v_adopted record;
begin
  v_ids := array(
    select h.id
    from fairq.held h
    join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    where h.shard_no = p_tick.shard_no
      and not h.counted
      and t.queue = p_tick.queue
      and t.group_key = any(v_groups)
    for update of h skip locked
  );
  update fairq.held h set counted = true where h.shard_no = p_tick.shard_no and h.id = any(v_ids);

  foreach v_lane in array p_lanes loop
    if v_lane.group_key = any(v_groups) then
      select count(*) filter (where i.id = any(v_ids)) as counted, count(*) filter (where i.id <> all(v_ids)) as uncounted into v_adopted
      from (
        select h.id
        from fairq.held h
        join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
        where h.shard_no = p_tick.shard_no
          and (not h.counted or h.id = any(v_ids))
          and t.queue = p_tick.queue
          and t.group_key = v_lane.group_key
        union all
        select r.id
        from fairq.ready r
        where r.shard_no = p_tick.shard_no and r.queue = p_tick.queue and r.position >= 0 and r.group_key = v_lane.group_key
          and not r.counted
      ) i;
      v_lane.gate.in_flight := coalesce((v_lane.gate).in_flight, 0) + v_adopted.counted;
      v_lane.gate.uncounted := nullif(v_adopted.uncounted, 0);
      v_allowance := fairq._allowance(v_lane.policy, v_lane.gate, p_now);
      v_lane.admissible := v_lane.cursors <> '{}' and v_allowance.tasks > 0;
      v_lane.look_at := case when v_adopted.uncounted > 0 then p_now + interval '100 milliseconds' when v_lane.cursors <> '{}' then v_allowance.look_at end;
    end if;
    v_lanes := v_lanes || v_lane;
  end loop;
  return v_lanes;
end;
$$;

-- The groups of those tasks that are ready.
create function fairq._groups_of_ready(p_shard_no integer, p_ids bigint[]) returns text[]
language plpgsql stable set search_path = '' as $$
begin
  return array(
    select distinct t.group_key
    from unnest(p_ids) i(id)
    cross join lateral (
      select r.group_key
      from fairq.ready r
      where r.shard_no = p_shard_no and r.id = i.id
      offset 0
    ) t
  );
end;
$$;

-- Ends the waiting tasks among those somebody wished to cancel. Held ones are left: their wish stays, and their holder learns of
-- it with its heartbeat. A ready task that is being popped right now is locked and counts as held; should the pop roll back it would be waiting again,
-- so the wish is rung once more.
-- "offset 0": as joins, each of these look-ups could become a walk through all wishes there ever were.
-- Locks: ready and parked with "skip locked"; bodies, which the caller's domain lock protects; cancellations.
create function fairq._cancel_waiting(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
declare
  v_tasks fairq.leaving[] := fairq._find_waiting(p_shard_no, array(
    select distinct i.id
    from unnest(p_ids) i(id)
    -- retry_task withdraws the wish, not the ring.
    where exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
  ), 'cancelled', null);
begin
  perform fairq._leave(p_shard_no, v_tasks, p_now);
  perform fairq._remove(p_shard_no, 'cancellations', array(
    select w.ctid
    from unnest(v_tasks) t
    cross join lateral (
      select c.ctid
      from fairq.cancellations c
      where c.shard_no = p_shard_no and c.task_id = t.id
      offset 0
    ) w
  ));
  perform fairq._ring_wishes(p_shard_no, p_ids);
end;
$$;

-- sql/promote/settle.sql

-- The lanes that news came for, as they are after it. From here on they live in o_lanes only, until admission writes their next versions.
-- Locks: lanes, rows it replaces; the caller holds the domain.
-- Cost: one step in lanes_pkey and one in groups per group that rang.
create function fairq._settle_lanes(
  p_tick fairq.ticks, p_queue fairq.queues, p_news fairq.news[], p_now timestamptz, out o_tick fairq.ticks, out o_lanes fairq.lanes[]
)
language plpgsql set search_path = '' as $$
declare
  v_replaced tid[];
  v_lane_count bigint;
  v_newcomer_position bigint;
  -- Whether every group of the queue has limits; otherwise only those with settings of their own may have any.
  v_limited boolean := coalesce(p_queue.group_max_running, p_queue.group_rate_limit, p_queue.group_breaker_threshold) is not null;
begin
  with lane as materialized (
    select n.group_key, n.first_sequence, n.keyed or coalesce(l.keyed, false) as keyed,
      l.ctid as replaces, l.version, l.lane_no, l.position, l.last_priority, l.last_sequence,
      coalesce(c.finish, l.finish) as finish,
      c.pace as pace,
      n.correction is not null as is_corrected,
      l.cursors is null or l.cursors = '{}' as was_idle,
      case
        when n.heard is null then coalesce(l.cursors, '{}')
        when cardinality(n.heard) = 1 and coalesce(l.cursors, '{}') = '{}'
          then array[((n.heard[1]).priority, (n.heard[1]).sequence, p_tick.touched, false)::fairq.cursor]
        else fairq._merge_cursors(l.cursors, n.heard, p_tick.touched)
      end as cursors,
      coalesce((g.settings).weight, p_queue.weight) as weight,
      g.policy,
      case
        when g.policy is distinct from null or l.gate is distinct from null
          then fairq._settle(g.policy, l.gate, n.freed, n.failures, n.succeeded, p_now)
      end as gate
    from unnest(p_news) n
    left join lateral (
      select v.ctid, v.version, v.lane_no, v.finish, v.position, v.keyed, v.gate, v.pace, v.last_priority, v.last_sequence, v.cursors
      from fairq.lanes v
      where v.shard_no = p_tick.shard_no and v.queue = p_tick.queue and v.group_key = n.group_key and v.version >= p_tick.first_version
      order by v.version desc
      limit 1
    ) l on true
    cross join lateral (
      select s as settings, case when s.queue is not null or v_limited then fairq._policy(p_queue, s) end as policy
      from (values (1)) one
      left join lateral (
        select c.*
        from fairq.groups c
        where c.shard_no = p_tick.shard_no and c.queue = p_tick.queue and c.group_key = n.group_key
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
    select l.*,
      case when l.policy is distinct from null then fairq._allowance(l.policy, l.gate, p_now) end as allowance,
      coalesce(l.lane_no, p_tick.lane_count + row_number() over (partition by l.lane_no is null order by l.first_sequence)) as number,
      case
        when l.was_idle and coalesce(l.finish, 0) <= p_tick.clock and l.first_sequence is not null
          then row_number() over (
            partition by l.was_idle and coalesce(l.finish, 0) <= p_tick.clock and l.first_sequence is not null
            -- Groups that wait for the same concurrency key are idle until it is free: they take turns.
            order by case when l.keyed then coalesce(l.finish, 0) else 0 end, l.first_sequence)
      end as nth_newcomer
    from lane l
  ),
  placed as (
    -- A group that was idle, and has used up its last turn, comes at once: before the lane that is next, behind the newcomers before it. Of a crowd only
    -- the first few do, the others have their turn in the same round: a tenant of a thousand keys would be a thousand newcomers before the next.
    select n.*, case when n.nth_newcomer <= 16 then least(p_tick.newcomer_position + n.nth_newcomer, fairq._gap_end(p_tick.clock_position)) end as newcomer_position
    from numbered n
  ),
  told as (
    -- Nobody starts before the clock. A group that waits keeps its place, whatever it adds.
    select n.replaces, n.number, n.newcomer_position,
      (p_tick.shard_no, coalesce(n.last_priority, 0), coalesce(n.last_sequence, 0), n.number, coalesce(n.version, p_tick.first_version - 1),
       greatest(n.finish, p_tick.clock),
       case
         when n.newcomer_position is not null then n.newcomer_position
         when (n.finish, n.position) >= (p_tick.clock, p_tick.clock_position) and not n.was_idle and not n.is_corrected then n.position
         when n.finish > p_tick.clock then fairq._lane_position(n.number)
         else greatest(fairq._lane_position(n.number), p_tick.clock_position)
       end,
       n.weight,
       case when n.cursors <> '{}' then (n.allowance).look_at end,
       n.cursors <> '{}' and (n.policy is null or (n.allowance).tasks > 0),
       n.keyed, p_tick.queue, n.group_key, n.cursors, n.policy, n.gate, n.pace)::fairq.lanes as lane
    from placed n
  )
  select max(t.number), max(t.newcomer_position), coalesce(array_agg(t.lane), '{}'), array_agg(t.replaces) filter (where t.replaces is not null)
  into v_lane_count, v_newcomer_position, o_lanes, v_replaced
  from told t;

  o_tick := p_tick;
  o_tick.lane_count := greatest(p_tick.lane_count, v_lane_count);
  o_tick.newcomer_position := greatest(p_tick.newcomer_position, v_newcomer_position);
  o_tick.keyed := p_tick.keyed or exists (select from unnest(o_lanes) l where l.keyed);
  if v_replaced is not null then
    perform fairq._remove(p_tick.shard_no, 'lanes', v_replaced);
  end if;
end;
$$;

-- The cursors of a lane after more of its tasks were heard of: per priority the smaller sequence, highest priority first. A level that is new to the lane
-- knows nothing of what was taken from it before: p_touched, of the whole domain, says what surely was not. Eight levels at most: the last
-- one then stands for all below, so that twenty thousand levels cost what eight do.
create function fairq._merge_cursors(p_cursors fairq.cursor[], p_heard fairq.cursor[], p_touched bigint) returns fairq.cursor[]
language sql immutable as $$
  with level as (
    select u.priority, min(u.sequence) as sequence, coalesce(max(u.touched), p_touched) as touched, coalesce(bool_or(u.is_open), false) as is_open,
      row_number() over (order by u.priority desc) as nth
    from unnest(p_cursors || p_heard) u
    -- What an open level covers already.
    where u.priority >= coalesce((select o.priority from unnest(p_cursors) o where o.is_open), u.priority)
    group by u.priority
  )
  select array_agg((l.priority, l.sequence, case when l.nth = 8 then (select max(m.touched) from level m where m.nth >= 8) else l.touched end,
      l.is_open or (l.nth = 8 and exists (select from level m where m.nth > 8)))::fairq.cursor order by l.priority desc)
  from level l
  where l.nth <= 8
$$;

-- sql/promote/start_anew.sql

-- What promotion knows can be thrown away and made anew from bodies and holders, at any time (I11). It does so by itself when a domain has no tick it can
-- trust, after a dump was restored into a cluster of other transaction ids; fairq.rebuild() is for people.
-- No matter how many tasks there are, nothing of this reads them all at once: ready tasks go back in line, holders are counted, the clock goes past every
-- lane there was, and the bodies are announced again, a portion with each pass.

-- Makes a domain, with its first tick: what is rung from now on will be heard.
create function fairq._open_domain(p_shard_no integer, p_queue text) returns void
language plpgsql set search_path = '' as $$
begin
  insert into fairq.domains (shard_no, queue) values (p_shard_no, p_queue) on conflict do nothing;
  if found then
    perform fairq._write_tick(fairq._blank_tick(p_shard_no, p_queue, 0, pg_current_snapshot()));
  end if;
end;
$$;

-- A tick that knows nothing, and hears every ring that is not visible in the snapshot, and those of its own transaction. Not written yet.
create function fairq._blank_tick(p_shard_no integer, p_queue text, p_tick bigint, p_snapshot pg_snapshot) returns fairq.ticks
language plpgsql stable set search_path = '' as $$
declare
  v_tick fairq.ticks;
begin
  v_tick.shard_no := p_shard_no;
  v_tick.queue := p_queue;
  v_tick.tick := p_tick;
  v_tick.clock := 0;
  v_tick.clock_position := 0;
  v_tick.newcomer_position := 0;
  v_tick.top := 0;
  v_tick.next_xid := pg_snapshot_xmax(p_snapshot);
  v_tick.heard_xid := '0';
  v_tick.heard_ring := 0;
  v_tick.lane_count := 0;
  v_tick.touched := 0;
  v_tick.first_version := 1;
  v_tick.filled := 0;
  v_tick.keyed := false;
  v_tick.pending := array(
    select (p.xid, 0)::fairq.heard
    from (select pg_snapshot_xip(p_snapshot) union select pg_current_xact_id()) p(xid)
    where p.xid < v_tick.next_xid
    order by p.xid
  );
  return v_tick;
end;
$$;

-- Forgets what promotion knows of a domain.
-- A ready task that is being popped is waited for: should the pop roll back, nobody would look for it where it was.
-- One statement counts the holders' places, and gives the snapshot: taken a moment apart, a task that left in between would be off the count already, and
-- its ring, which the tick holds for pending, would take it off again.
-- Returns the tick it wrote.
-- Locks: ready, rings, parked of the domain; the caller holds the domain.
-- Cost: ready and held tasks, and the rings that were not swept yet.
create function fairq._start_anew(p_shard_no integer, p_queue text) returns fairq.ticks
language plpgsql set search_path = '' as $$
declare
  v_snapshot pg_snapshot;
  v_last record;
  v_tick fairq.ticks;
begin
  perform fairq._lock_keys(p_shard_no, true);
  select coalesce(max(k.tick), 0) as tick, coalesce(max(greatest(k.top, k.clock)), 0) as top into v_last
  from fairq.ticks k
  where k.shard_no = p_shard_no and k.queue = p_queue;
  -- Transaction ids, ticks and the clock may start lower than the sweeps have come.
  delete from fairq.sweeps w
  where w.shard_no = p_shard_no
    and w.what in ('rings ' || p_queue, 'late rings ' || p_queue, 'ticks ' || p_queue, 'lanes ' || p_queue);

  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue
  ),
  gone as (
    delete from fairq.ready r
    where r.shard_no = p_shard_no
      and r.id = any(array(select k.id from fairq.ready k where k.shard_no = p_shard_no and k.queue = p_queue and k.position >= 0 for update))
    returning r.id, r.keyed
  ),
  given as (
    -- Waiting for a key is found out again; so is who is given one.
    delete from fairq.parked k
    where k.shard_no = p_shard_no and k.queue = p_queue and k.granted
    returning k.id, k.granted as keyed
  ),
  freed as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select p_shard_no, '#keys', t.concurrency_key, count(*)
    from (select g.id from gone g where g.keyed union all select v.id from given v) k
    join fairq.tasks t on t.shard_no = p_shard_no and t.id = k.id
    group by t.concurrency_key
  ),
  taken as (
    insert into fairq.rings (shard_no, queue, group_key, freed)
    select p_shard_no, p_queue, t.group_key, -count(*)
    from fairq.held h
    join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    where h.shard_no = p_shard_no
      and h.counted
      and t.queue = p_queue
    group by t.group_key
  )
  select pg_current_snapshot() into v_snapshot;

  v_tick := fairq._blank_tick(p_shard_no, p_queue, v_last.tick, v_snapshot);
  v_tick.clock := v_last.top + fairq._round();
  v_tick.top := v_tick.clock;
  -- Versions go on where the lanes of before end.
  select coalesce(max(l.version), 0) + 1, coalesce(max(l.lane_no), 0) into v_tick.first_version, v_tick.lane_count
  from fairq.lanes l
  where l.shard_no = p_shard_no and l.queue = p_queue;
  v_tick.touched := fairq._last_sequence();
  select min(t.id) into v_tick.announce_from
  from fairq.tasks t
  where t.shard_no = p_shard_no;
  return fairq._write_tick(v_tick);
end;
$$;

-- The highest sequence given to any task.
create function fairq._last_sequence() returns bigint
language sql set search_path = ''
as $$ select s.last_value from fairq.task_ids s $$;

-- After a rebuild: rings for the next portion of bodies, as if they had just been created; those parked are so no more.
-- Cost: 5000 entries of tasks_pkey.
create function fairq._announce_bodies(p_tick fairq.ticks) returns fairq.ticks
language plpgsql set search_path = '' as $$
declare
  v_portion record;
begin
  if p_tick.announce_from is null then
    return p_tick;
  end if;
  with portion as materialized (
    select t.id, t.queue, t.group_key, t.priority, t.sequence, t.scheduled, t.run_at, t.concurrency_key
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no and t.id >= p_tick.announce_from
    order by t.id
    limit 5000
  ),
  unparked as (
    delete from fairq.parked k
    where k.shard_no = p_tick.shard_no
      and k.id = any(array(select p.id from portion p where p.queue = p_tick.queue and p.concurrency_key is not null))
      and not k.granted
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
    select p_tick.shard_no, p_tick.queue, p.group_key, p.priority, min(p.sequence), bool_or(p.concurrency_key is not null)
    from portion p
    where p.queue = p_tick.queue and not p.scheduled
    group by p.group_key, p.priority
  ),
  due as (
    insert into fairq.rings (shard_no, queue, group_key, due_at)
    select p_tick.shard_no, p_tick.queue, min(p.group_key), min(p.run_at)
    from portion p
    where p.queue = p_tick.queue and p.scheduled
    having count(*) > 0
  ),
  wished as (
    insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
    select p_tick.shard_no, p_tick.queue, p.group_key, p.id
    from portion p
    where p.queue = p_tick.queue
      and exists (select from fairq.cancellations c where c.shard_no = p_tick.shard_no and c.task_id = p.id offset 0)
  )
  select count(*) as tasks, max(p.id) as last_id into v_portion from portion p;
  p_tick.announce_from := case when v_portion.tasks = 5000 then v_portion.last_id + 1 end;
  return p_tick;
end;
$$;

-- sql/promote/ticks.sql

-- The newest tick of a domain; nothing when there is none, or when it was written in another life of the database.
-- A restored dump keeps written_by but gets new row headers, so xmin tells; the stored horizon means nothing then.
-- Cost: one entry of ticks_pkey, read backwards, however many dead ticks lie before it.
create function fairq._tick(p_shard_no integer, p_queue text) returns setof fairq.ticks
language sql stable as $$
  select n.shard_no, n.written_by, n.tick, n.clock, n.clock_position, n.newcomer_position, n.top, n.horizon, n.horizon_position, n.refill_block,
    n.refill_position, n.next_xid, n.heard_xid, n.heard_ring, n.next_due_at, n.lane_count, n.touched, n.first_version, n.announce_from, n.filled,
    n.keyed, n.queue, n.pending
  from (
    select t.*, t.xmin as row_xmin
    from fairq.ticks t
    where t.shard_no = p_shard_no and t.queue = p_queue
    order by t.tick desc
    limit 1
  ) n
  where n.row_xmin = n.written_by
$$;

-- Appends a tick, the next one after the one given. Inside a savepoint the row's xmin is the subtransaction's, which only the row itself can tell:
-- then written_by is corrected at once, or the next reader would take the tick for a restored one. ("returning xmin" would be shorter, and fails
-- where the table is partitioned.)
-- Returns the tick as it was written.
create function fairq._write_tick(p_tick fairq.ticks) returns fairq.ticks
language plpgsql set search_path = '' as $$
begin
  p_tick.tick := p_tick.tick + 1;
  p_tick.written_by := pg_current_xact_id()::xid;
  insert into fairq.ticks select (p_tick).*;
  update fairq.ticks t
  set written_by = t.xmin
  where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.tick = p_tick.tick
    and t.written_by <> t.xmin;
  return p_tick;
end;
$$;

-- sql/pop/heartbeat.sql

-- A worker's sign of life.
-- Returns those of its tasks that somebody wished to cancel, until they are finished: stop them, and finish them as cancelled.
-- Raises QF004 unknown worker: it counts as lost, and its tasks may be with others.
-- Locks: heartbeats, the worker's own rows.
-- With p_ids, the tasks it is running, only these are looked up: a worker that knows them should say them.
-- Cost: one step in held_pkey and one in cancellations_task_idx for each of p_ids; without it all open cancellations are read. Never all the
-- worker's tasks: under a held xmin that would be all it ever ran.
create function fairq.heartbeat(p_worker_id bigint, p_ids bigint[] default null) returns setof bigint
language plpgsql rows 1 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
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
          from fairq.held h
          where h.shard_no = v_shard_no and h.id = i.id and h.worker_id = p_worker_id
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
        from fairq.held h
        where h.shard_no = v_shard_no and h.id = c.task_id and h.worker_id = p_worker_id
        offset 0
      ) t
      where c.shard_no = v_shard_no;
  end loop;
end;
$$;
comment on function fairq.heartbeat is 'A worker''s sign of life. Returns its tasks that are to be cancelled.';

-- Checks that a worker is known, and renews its heartbeat when a third of its lease is gone: working is a sign of life.
-- Raises QF004, also when its tasks were taken from it.
-- Locks: heartbeats, the worker's own rows, when it beats.
-- Cost: one entry of heartbeats_pkey, read backwards.
create function fairq._touch_worker(p_shard_no integer, p_worker_id bigint, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
declare
  v_lease interval;
  v_beat_at timestamptz;
begin
  select w.lease, (
      select h.beat_at
      from fairq.heartbeats h
      where h.shard_no = p_shard_no and h.worker_id = p_worker_id
      order by h.beat_at desc
      limit 1
    )
  into v_lease, v_beat_at
  from fairq.workers w
  where w.shard_no = p_shard_no and w.worker_id = p_worker_id
    and w.lost_at is null;
  if not found then
    perform fairq._refuse_worker(p_worker_id);
  end if;
  if v_beat_at is null or v_beat_at < p_now - v_lease / 3 then
    perform fairq._beat(p_shard_no, p_worker_id, p_now);
  end if;
end;
$$;

-- Keeps a worker from being given up until the transaction ends: between a pop and its commit, that would leave the tasks with nobody.
-- Raises QF004 when it was given up a moment ago.
-- Locks: workers, one row, shared.
create function fairq._hold_worker(p_shard_no integer, p_worker_id bigint) returns void
language plpgsql set search_path = '' as $$
begin
  perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id and w.lost_at is null for key share;
  if not found then
    perform fairq._refuse_worker(p_worker_id);
  end if;
end;
$$;

-- Raises QF004: the worker is unknown, or was given up.
create function fairq._refuse_worker(p_worker_id bigint) returns void
language plpgsql immutable set search_path = '' as $$
begin
  raise exception 'there is no worker %', coalesce(p_worker_id::text, 'null')
    using errcode = 'QF004',
      hint = 'It was retired, or counted as lost because it gave no sign of life for its lease. Register again: select fairq.register_worker(...);';
end;
$$;

-- Writes a sign of life: insert the new one, delete the ones before it.
create function fairq._beat(p_shard_no integer, p_worker_id bigint, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
declare
  v_previous timestamptz;
begin
  select h.beat_at into v_previous
  from fairq.heartbeats h
  where h.shard_no = p_shard_no and h.worker_id = p_worker_id
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
  where h.shard_no = p_shard_no and h.worker_id = p_worker_id
    and h.beat_at = v_previous;
end;
$$;

-- sql/pop/held_tasks.sql

-- Which of these tasks the worker still holds, in these attempts. For a handler that ended its task in a transaction of its own: the task is gone when
-- that committed, still held when it rolled back, and locked, so not in the answer, while it is open.
-- Raises QF011 arrays of different length.
-- Locks: held, the rows it returns, "skip locked".
create function fairq.held_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
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
        from fairq.held t
        where t.shard_no = v_shard_no and t.id = i.id and t.attempt = i.attempt and t.worker_id = p_worker_id
        for update skip locked
        offset 0
      ) h;
  end loop;
end;
$$;
comment on function fairq.held_tasks is
  'Which of these tasks a worker still holds; one that an open transaction is finishing is not in the answer.';

-- sql/pop/next_due_at.sql

-- When a queue has to be looked at again although nothing rings: a scheduled task becomes due, a rate or a breaker lets the next one pass. For workers that sleep.
-- Returns null when there is no such time.
create function fairq.next_due_at(p_queue text) returns timestamptz
language plpgsql set search_path = '' as $$
declare
  v_now timestamptz := fairq._now();
  v_next timestamptz;
  v_metered timestamptz;
begin
  select min(k.next_due_at) into v_next
  from fairq._shards(null) s(shard_no)
  cross join lateral fairq._tick(s.shard_no, p_queue) k;
  if (select q.metered from fairq.queues q where q.queue = p_queue) then
    select max((fairq._allowance(l.policy, l.gate, v_now)).look_at) into v_metered
    from (values ('queue ' || p_queue), ('cluster')) m(scope)
    cross join lateral fairq._lane(0, '#meters', m.scope) l
    where l.policy is distinct from null;
  end if;
  return least(v_next, v_metered);
end;
$$;
comment on function fairq.next_due_at is 'When a sleeping worker should look at a queue again, at the latest.';

-- sql/pop/pop_tasks.sql

-- Takes the next tasks of a queue in served order and hands them to a worker, which finishes, releases or loses each of them. Alone enough for a
-- consumer in any language: it promotes by itself when it has to.
-- With p_claim_lease the tasks are claimed, not running: they must be started (start_tasks) before the lease ends, or others get them.
-- Returns the tasks, at most p_limit, in served order; no row when there is nothing to do, and then nothing was written.
-- Raises QF003 unknown queue, QF004 unknown worker, QF005 not READ COMMITTED, QF007 bad limit, QF009 bad lease, QF015 claim leases under a cap of
-- the cluster.
-- Locks: the tasks it returns; the domain when it promotes. Commit before working on the tasks.
create function fairq.pop_tasks(
  p_queue text, p_limit integer, p_worker_id bigint, p_claim_lease interval default null, p_shard_no integer default null
) returns setof fairq.popped
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
declare
  v_shard_no integer;
  v_left integer := p_limit;
  v_popped integer;
  v_first integer := floor(random() * 4096)::integer;
  v_may_wait boolean := true;
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation(p_queue);
  perform fairq._check_length('the claim lease', p_claim_lease, interval '366 days');
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
comment on function fairq.pop_tasks is 'Hands the next tasks of a queue to a worker, in served order.';

-- Pops from one domain. What is ready before the horizon is taken as it stands, while there is no news and it is enough. Otherwise this pop promotes, and is
-- handed what it needs on the way.
-- Another session that holds the domain's lock is promoting already; it is waited for only when there is nothing else to do, and not for long. p_may_wait
-- says that this call holds nothing in another shard yet: who promotes all shards in their order may be waiting for just that.
-- Goes on until it has what was asked for, or a round changed nothing: a round may meet only tasks that expired, lanes whose tasks were
-- cancelled, or a schedule that it hears of when it is due already. A call does eight rounds at most, and so a bounded amount of hearing and parking: the next one goes on.
-- A paused queue gives nothing; one with a cap, rate or breaker of its own, or of the cluster, asks the meters first.
-- Locks: #meters where there are any; the domain while promoting; ready, the rows it takes; the worker's row, shared, once it has tasks.
-- Cost: p_limit entries of ready_order_idx plus those popped since the last tick.
create function fairq._pop(
  p_shard_no integer, p_queue text, p_limit integer, p_worker_id bigint, p_claim_lease interval, p_may_wait boolean
) returns setof fairq.popped
language plpgsql set search_path = '' as $$
declare
  v_now timestamptz := fairq._now();
  v_queue fairq.queues;
  v_tick fairq.ticks;
  v_left integer := p_limit;
  v_meters integer := 0;
  v_before fairq.ticks;
  v_promoted integer;
  v_goes_on boolean;
  v_popped fairq.placed[];
  v_ready tid[];
  v_held integer;
  v_has_news boolean;
  v_waited boolean := false;
  v_rounds integer := 0;
  v_used_up bigint;
begin
  perform fairq._touch_worker(p_shard_no, p_worker_id, v_now);
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

  for v_round in 1 .. 1000 loop
    select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    v_before := v_tick;
    v_promoted := null;
    v_popped := null;
    v_has_news := v_tick.tick is null or fairq._has_news(v_tick);
    if v_round > 1 or v_has_news then
      select m.o_promoted, m.o_popped, m.o_goes_on into v_promoted, v_popped, v_goes_on
      from fairq._promote(p_shard_no, p_queue, fairq._ready_target(p_shard_no, v_queue, p_worker_id, v_left), false, v_used_up, v_left) m;
      select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
    end if;
    if v_promoted is null then
      v_popped := fairq._pick(v_tick, v_left, true);
    end if;

    v_held := 0;
    if v_popped <> '{}' then
      if v_left = p_limit then
        perform fairq._hold_worker(p_shard_no, p_worker_id);
      end if;
      v_ready := array(select p.ready from unnest(v_popped) p where p.ready is not null);
      if v_ready <> '{}' then
        perform fairq._remove(p_shard_no, 'ready', v_ready);
      end if;
      return query select h.* from fairq._hold(p_shard_no, v_popped, p_worker_id, p_claim_lease, v_now, v_meters) h;
      get diagnostics v_held = row_count;
      v_left := v_left - v_held;
      if v_held < cardinality(v_popped) then
        perform fairq._leave(p_shard_no, fairq._find_late(p_shard_no, v_popped, v_now), v_now);
      end if;
    end if;

    exit when v_left = 0;
    v_used_up := v_tick.tick;
    v_has_news := v_tick.tick is null or fairq._has_news(v_tick);
    if v_promoted is null and v_left = p_limit and v_popped = '{}' and p_may_wait and not v_waited and (v_round > 1 or v_has_news) then
      -- Somebody else promotes, and there is nothing else to do: that takes milliseconds. Then look again.
      v_waited := true;
      continue when fairq._await_domain(p_shard_no, p_queue);
    end if;
    -- Nothing waits any more: what was taken was all there was. Where some of it had expired there may be more behind it.
    exit when v_tick.horizon is null and v_held = cardinality(v_popped) and not v_has_news;
    -- Those that only met tasks that had expired are not counted: nobody is hidden behind them.
    v_rounds := v_rounds + case when v_held = cardinality(v_popped) then 1 else 0 end;
    exit when v_rounds >= 8;
    -- Somebody else promotes, or the news is none that a promotion can act on (a due task that another transaction holds).
    exit when v_round > 1 and v_popped = '{}'
      and (v_promoted is null or v_promoted = 0 and not v_goes_on and v_tick.horizon is not distinct from v_before.horizon
        and v_tick.horizon_position is not distinct from v_before.horizon_position and v_tick.next_xid = v_before.next_xid
        and v_tick.pending = v_before.pending and v_tick.touched = v_before.touched
        and v_tick.next_due_at is not distinct from v_before.next_due_at);
  end loop;
  if v_queue.metered and v_left < p_limit then
    perform fairq._charge_meters(p_queue, p_limit - v_left, v_now);
  end if;
end;
$$;

-- Gives tasks to a worker, which are in the ready set no more, or never were. A task whose deadline passed is left out.
-- Returns the tasks in served order.
-- Locks: none; nobody else can have them.
-- Cost: one step in tasks_pkey per task.
create function fairq._hold(p_shard_no integer, p_tasks fairq.placed[], p_worker_id bigint, p_claim_lease interval, p_now timestamptz, p_meters integer)
returns setof fairq.popped
language plpgsql rows 100 set search_path = '' as $$
begin
  return query
    with task as materialized (
      select b.id, b.attempt + 1 as attempt, b.max_attempts, b.queue, b.group_key, b.kind, b.priority, b.cost, b.created_at, b.run_at, b.expires_at, b.timeout,
        b.idempotency_key, b.concurrency_key, b.headers, b.payload, p.block, p.position, p.charge, p.counted, p.keyed
      from unnest(p_tasks) p
      cross join lateral (
        -- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
        select t.*
        from fairq.tasks t
        where t.shard_no = p_shard_no and t.id = p.id
        offset 0
      ) b
      where b.expires_at is null
        or b.expires_at > p_now
    ),
    held as (
      insert into fairq.held (shard_no, id, worker_id, attempt, started_at, lease_expires_at, charge, meters, counted, keyed)
      select p_shard_no, t.id, p_worker_id, t.attempt, case when p_claim_lease is null then p_now end, p_now + p_claim_lease, t.charge, p_meters,
        t.counted, t.keyed
      from task t
    )
    select p_shard_no, t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind, t.priority, t.cost, t.created_at, t.run_at, t.expires_at,
      case when p_claim_lease is null then p_now end, p_now + p_claim_lease, t.timeout, t.idempotency_key, t.concurrency_key, t.headers, t.payload,
      t.block, t.position
    from task t;
end;
$$;

-- Those of popped tasks whose deadline passed, with what they hold.
create function fairq._find_late(p_shard_no integer, p_tasks fairq.placed[], p_now timestamptz) returns fairq.leaving[]
language plpgsql stable set search_path = '' as $$
begin
  return (
    select array_agg((b.id, b.ctid, null, null, null, 'expired', null, null, null, null, null, null, p.charge, 0, p.counted, p.keyed)::fairq.leaving)
    from unnest(p_tasks) p
    cross join lateral (
      select t.id, t.ctid
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = p.id and t.expires_at <= p_now
      offset 0
    ) b
  );
end;
$$;

-- How many tasks a pass makes ready beside those it hands over. A task that is handed over is written once less than one that becomes ready
-- first, so what a single worker needs is not kept ready; but a pass costs the same for one task as for many, so it is worth two hundred, and other
-- workers should find something without waiting: twice what they can run.
-- Where groups share time, fifty: what is ready was charged by an estimate that may be wrong.
create function fairq._ready_target(p_shard_no integer, p_queue fairq.queues, p_worker_id bigint default null, p_take integer default 0) returns integer
language plpgsql stable set search_path = '' as $$
begin
  return coalesce(p_queue.ready_target, greatest(
    case when p_queue.fairness = 'time' then 50 when p_worker_id is null then 1000 else 200 end - p_take,
    (
      select 2 * least(coalesce(sum(w.slots), 0), 500000)
      from fairq.workers w
      where w.shard_no = p_shard_no
        and w.worker_id is distinct from p_worker_id
        and p_queue.queue = any(w.queues)
    )
  ))::integer;
end;
$$;

-- sql/pop/register_worker.sql

-- Registers a worker. It is alive until it is retired, or gives no sign of life (heartbeat, pop) for p_lease.
-- Returns its id, which every later call names.
-- Raises QF003 unknown queue, QF007 bad slots, QF009 bad lease, QF006 bad name.
create function fairq.register_worker(p_name text, p_queues text[], p_slots integer, p_lease interval default '1 minute') returns bigint
language plpgsql set search_path = '' as $$
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
comment on function fairq.register_worker is 'Registers a worker and returns its id.';

-- sql/pop/report_progress.sql

-- How far running tasks are, as their handlers say; the newest report of a task replaces the one before.
-- Returns the ids that were accepted; a stale one is missing.
-- Raises QF011 arrays of different length.
-- Locks: progress, the tasks' own rows.
-- Cost: one step in held_pkey and one in progress_pkey per task.
create function fairq.report_progress(
  p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_done double precision[], p_totals double precision[] default null,
  p_notes jsonb[] default null, p_shard_no integer default null
) returns setof bigint
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
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
          from fairq.held k
          where k.shard_no = v_shard_no and k.id = i.id and k.attempt = i.attempt and k.worker_id = p_worker_id
          offset 0
        ) t
        left join lateral (
          select g.reported_at
          from fairq.progress g
          where g.shard_no = v_shard_no and g.task_id = t.id
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
        where g.shard_no = v_shard_no and g.task_id = h.id
          and g.reported_at = h.previous
          and h.previous < v_now
      )
      select h.id from held h;
  end loop;
end;
$$;
comment on function fairq.report_progress is
  'How far running tasks are. Returns the ids accepted.';

-- sql/pop/start_tasks.sql

-- Prefetch only: claimed tasks begin to run. Ownership, lease and deadline are looked at once more, before any user code runs: a task whose
-- claim ran out or was taken over is missing in the answer, one whose deadline passed in the buffer ends as expired and is missing too.
-- Returns the ids to run.
-- Raises QF011 arrays of different length.
-- Locks: held, the rows named, in the order of their ids.
create function fairq.start_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_ctids tid[];
  v_expired bigint[];
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    select array_agg(h.ctid) filter (where not b.is_expired and h.lease_expires_at > v_now), array_agg(h.id) filter (where b.is_expired)
    into v_ctids, v_expired
    from (select u.id, u.attempt from unnest(p_ids, p_attempts) as u(id, attempt) order by u.id offset 0) i
    cross join lateral (
      select k.ctid, k.id, k.lease_expires_at
      from fairq.held k
      where k.shard_no = v_shard_no and k.id = i.id and k.attempt = i.attempt and k.worker_id = p_worker_id
        and k.started_at is null
      for update
      offset 0
    ) h
    cross join lateral (
      select coalesce(t.expires_at <= v_now, false) as is_expired
      from fairq.tasks t
      where t.shard_no = v_shard_no and t.id = i.id
      offset 0
    ) b;
    if v_expired is not null then
      perform fairq._leave(v_shard_no, fairq._find_of_worker(v_shard_no, p_worker_id, v_expired, 'expired', null), v_now);
    end if;
    return query select s.id from fairq._start(v_shard_no, v_ctids, v_now) s(id);
  end loop;
end;
$$;
comment on function fairq.start_tasks is
  'Prefetch: claimed tasks begin to run. Returns the ids that the worker still holds.';

-- By ctid and no other way, see _leave.
create function fairq._start(p_shard_no integer, p_ctids tid[], p_now timestamptz) returns setof bigint
language sql rows 100 set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
  update fairq.held k
  set started_at = p_now, lease_expires_at = null
  where k.shard_no = p_shard_no
    and k.ctid = any(p_ctids)
  returning k.id
$$;

-- sql/pop/turn.sql

-- A worker's whole turn in one statement: what ended is written, what is given back goes back, what was claimed starts, and the next tasks of its queues
-- come with the answer; when there are fewer than asked for, also when to look again. Either all of it happens or nothing.
-- p_queues and p_mosts say step by step whom to ask for how many; a queue may be asked again for what others left over, but not when it gave less
-- than it was asked for: it has no more. p_limit is the most over all; 0: only write.
-- Returns first one row with the ids that were accepted (see finish_tasks, release_tasks, start_tasks) and the seconds until something is due, then the
-- tasks. A turn that writes nothing and finds nothing leaves no trace, not even a transaction id.
-- Raises what pop_tasks, finish_tasks, release_tasks and start_tasks raise.
-- Locks: as these do, in the order in which they are named.
create function fairq.turn(
  p_worker_id bigint, p_queues text[], p_mosts integer[], p_limit integer, p_claim_lease interval default null, p_ended_ids bigint[] default '{}',
  p_ended_attempts integer[] default '{}', p_outcomes text[] default null, p_results jsonb[] default null, p_errors jsonb[] default null,
  p_retry_delays interval[] default null, p_released_ids bigint[] default '{}', p_released_attempts integer[] default '{}',
  p_started_ids bigint[] default '{}', p_started_attempts integer[] default '{}'
) returns setof fairq.turned
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
declare
  v_answer fairq.turned;
  v_tasks fairq.popped[] := array[]::fairq.popped[];
  v_popped fairq.popped[];
  v_empty text[] := array[]::text[];
  v_most integer;
begin
  if p_ended_ids <> '{}' then
    v_answer.ended := array(
      select f.* from fairq.finish_tasks(p_worker_id, p_ended_ids, p_ended_attempts, p_outcomes, p_results, p_errors, p_retry_delays) f
    );
  end if;
  if p_released_ids <> '{}' then
    v_answer.released := array(select r.* from fairq.release_tasks(p_worker_id, p_released_ids, p_released_attempts) r);
  end if;
  if p_started_ids <> '{}' then
    v_answer.started := array(select s.* from fairq.start_tasks(p_worker_id, p_started_ids, p_started_attempts) s);
  end if;
  if p_limit = 0 then
    return next v_answer;
    return;
  end if;

  for v_step in 1 .. coalesce(cardinality(p_queues), 0) loop
    v_most := least(p_mosts[v_step], p_limit - cardinality(v_tasks));
    exit when cardinality(v_tasks) >= p_limit;
    continue when p_queues[v_step] = any(v_empty);
    v_popped := array(select t from fairq.pop_tasks(p_queues[v_step], v_most, p_worker_id, p_claim_lease) t);
    v_tasks := v_tasks || v_popped;
    if cardinality(v_popped) < v_most then
      v_empty := v_empty || p_queues[v_step];
    end if;
  end loop;
  if cardinality(v_tasks) < p_limit then
    v_answer.due_in := extract(epoch from (
      select min(fairq.next_due_at(q.queue)) from (select distinct u.queue from unnest(p_queues) u(queue)) q
    ) - fairq._now())::double precision;
    -- One call hears and parks a bounded amount, and somebody else may be promoting: then there is more to look at soon.
    if exists (
      select
      from fairq.queues q
      cross join fairq._shards(null) s(shard_no)
      cross join lateral fairq._tick(s.shard_no, q.queue) k
      where q.queue = any(p_queues)
        and q.paused_at is null
        and fairq._has_news(k)
    ) then
      v_answer.due_in := least(v_answer.due_in, 0.02);
    end if;
  end if;
  return next v_answer;
  return query
    select null::bigint[], null::bigint[], null::bigint[], null::double precision, t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind, t.started_at,
      t.timeout, t.headers, t.payload
    from unnest(v_tasks) t;
end;
$$;
comment on function fairq.turn is 'A worker''s whole turn: writes what ended, gives back, starts, and hands out the next tasks.';

-- sql/leave/cancel_task.sql

-- Wishes to cancel a task, in the caller's transaction: two inserts, nothing is locked. When the transaction commits, a waiting task ends as
-- cancelled at the next promotion, which the next pop makes; a running one is told by its worker's heartbeat.
-- Returns true when the task was live.
create function fairq.cancel_task(p_id bigint) returns boolean
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
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
comment on function fairq.cancel_task is 'Cancels a task when the transaction commits. False: it is not live.';

-- sql/leave/finish_tasks.sql

-- Ends attempts, as their holder saw them end, in batches. Outcomes: succeeded; failed (for good); retry (again after a back-off while
-- attempts are left, else failed); cancelled; expired. Null arrays mean: all succeeded, no result, no error, the queue's back-off.
-- Returns the ids that were accepted. A missing one was not this worker's any more, in this attempt: nothing of it was changed (I10).
-- Raises QF011 arrays of different length, QF012 unknown outcome.
-- Locks: held, the rows named, in the order of their ids; no row that others share.
-- Cost: one step in held_pkey and one in tasks_pkey per task.
create function fairq.finish_tasks(
  p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_outcomes text[] default null, p_results jsonb[] default null,
  p_errors jsonb[] default null, p_retry_delays interval[] default null, p_shard_no integer default null
) returns setof bigint
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
declare
  v_count integer := coalesce(cardinality(p_ids), 0);
  v_now timestamptz := fairq._now();
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
      select l.*
      from fairq._leave(v_shard_no, fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays, v_now), v_now) l;
  end loop;
end;
$$;
comment on function fairq.finish_tasks is
  'Ends attempts of a worker''s tasks. Returns the ids accepted; a stale one is missing.';

-- sql/leave/leave.sql

-- The one way out of flight, whatever the outcome. A task that succeeded, failed, was cancelled or expired is history; one that is tried again later
-- waits for its time; one that was released, whose claim ran out, or whose worker was lost stands in line again, at its old place (I12).
-- What a task gives back is what its own row said that it holds, and the caller has read under the row's lock; nothing else.
-- Whatever leaves rings: the places that came free, what an attempt took beyond what was charged for it, where it stands in line again.
-- The attempt of a task that comes back has a number that is not given out again: worker and attempt are the fencing token, and the same worker may take
-- the task again while a message about the first time is still under way (I10). One that was given back may have one more.
-- By ctid and no other way: every other scan is switched off. Where statistics are missing or old, the planner finds a walk through all tasks of the
-- shard cheaper than a hundred fetches by ctid, and it keeps such a plan for the whole session.
-- Returns the ids.
-- Locks: the rows named, which the caller has locked. No row that others share.
create function fairq._leave(p_shard_no integer, p_tasks fairq.leaving[], p_now timestamptz) returns setof bigint
language plpgsql rows 100 set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
begin
  if p_tasks is null or p_tasks = '{}' then
    return;
  end if;
  return query
    with task as materialized (
      select t.id, t.body, t.held, t.ready, t.parked, t.outcome, t.result, t.error, t.run_at, t.attempt, t.worker_id, t.started_at, t.charge, t.meters,
        t.counted, t.keyed, t.nth, t.outcome in ('succeeded', 'failed', 'cancelled', 'expired') as ends
      from unnest(p_tasks) with ordinality as t(id, body, held, ready, parked, outcome, result, error, run_at, attempt, worker_id, started_at, charge, meters,
        counted, keyed, nth)
    ),
    unheld as (
      delete from fairq.held h where h.shard_no = p_shard_no and h.ctid = any(array(select t.held from task t where t.held is not null))
    ),
    unready as (
      delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(array(select t.ready from task t where t.ready is not null))
    ),
    unparked as (
      delete from fairq.parked k where k.shard_no = p_shard_no and k.ctid = any(array(select t.parked from task t where t.parked is not null))
    ),
    ended as (
      delete from fairq.tasks b
      using task t
      where b.shard_no = p_shard_no
        and b.ctid = t.body
        and t.ends
      returning b.*, t.outcome, t.result, t.error, t.started_at, t.worker_id, coalesce(t.attempt, b.attempt) as last_attempt,
        t.charge, t.meters, t.counted, t.keyed, t.nth
    ),
    history as (
      insert into fairq.finished_tasks (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at,
        expires_at, started_at, finished_at, cost, attempt, max_attempts, timeout, idempotency_key, concurrency_key, headers, payload,
        result, error)
      select e.shard_no, e.id, e.queue, e.group_key, e.kind, e.priority, e.outcome, e.worker_id, e.created_at, e.run_at,
        e.expires_at, e.started_at, p_now, e.cost, e.last_attempt, e.max_attempts, e.timeout, e.idempotency_key, e.concurrency_key, e.headers,
        e.payload, e.result, e.error
      from ended e
    ),
    back as (
      update fairq.tasks b
      set scheduled = t.outcome = 'retry' and t.run_at > p_now,
        run_at = coalesce(t.run_at, b.run_at),
        attempt = t.attempt,
        max_attempts = b.max_attempts + case when t.outcome in ('released', 'lease_expired') then 1 else 0 end
      from task t
      where b.shard_no = p_shard_no
        and b.ctid = t.body
        and not t.ends
      returning b.id, b.queue, b.group_key, b.kind, b.priority, b.sequence, b.scheduled, b.run_at, b.concurrency_key, t.outcome, t.error, t.attempt,
        t.worker_id, t.started_at, t.charge, t.meters, t.counted, t.keyed, t.nth
    ),
    attempted as (
      insert into fairq.attempts (shard_no, task_id, attempt, worker_id, started_at, ended_at, outcome, error)
      select p_shard_no, b.id, b.attempt, b.worker_id, b.started_at, p_now, b.outcome, b.error
      from back b
    ),
    in_line as (
      insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
      select p_shard_no, b.queue, b.group_key, b.priority, min(b.sequence), bool_or(b.concurrency_key is not null)
      from back b
      where not b.scheduled
      group by b.queue, b.group_key, b.priority
    ),
    due as (
      insert into fairq.rings (shard_no, queue, group_key, due_at)
      select p_shard_no, b.queue, min(b.group_key), min(b.run_at)
      from back b
      where b.scheduled
      group by b.queue
    ),
    left_flight as (
      select e.queue, e.group_key, e.kind, e.concurrency_key, e.outcome, e.started_at, e.charge, e.meters, e.counted, e.keyed, e.nth
      from ended e
      where e.counted or e.keyed or e.meters <> 0 or e.charge is not null
      union all
      select b.queue, b.group_key, b.kind, b.concurrency_key, b.outcome, b.started_at, b.charge, b.meters, b.counted, b.keyed, b.nth
      from back b
      where b.counted or b.keyed or b.meters <> 0 or b.charge is not null
    ),
    timed as (
      -- Where groups share time: what the attempts took beyond what was charged for them. Only one that ended by itself tells how long its kind takes.
      insert into fairq.rings (shard_no, queue, group_key, correction, ran)
      select p_shard_no, a.queue, a.group_key, sum(a.seconds - a.charge),
        case when a.measured then (a.kind, count(*), sum(a.seconds))::fairq.estimate end
      from (
        select l.queue, l.group_key, l.kind, l.charge, fairq._ran(l.started_at, p_now) as seconds,
          l.started_at is not null and l.outcome in ('succeeded', 'failed', 'retry', 'cancelled', 'expired') as measured
        from left_flight l
        where l.charge is not null
      ) a
      group by a.queue, a.group_key, a.kind, a.measured
    ),
    freed as (
      -- Places, and for breakers how the attempts ended: failures after the last success.
      insert into fairq.rings (shard_no, queue, group_key, freed, failures, succeeded)
      select f.shard_no, f.queue, f.group_key, count(*), count(*) filter (where f.outcome in ('failed', 'retry') and f.nth > f.last_success),
        bool_or(f.outcome = 'succeeded')
      from (
        select s.shard_no, s.queue, s.group_key, l.outcome, l.nth,
          coalesce(max(l.nth) filter (where l.outcome = 'succeeded') over (partition by s.shard_no, s.queue, s.group_key), 0) as last_success
        from left_flight l
        cross join lateral fairq._scopes(p_shard_no, l.queue, l.group_key, l.counted, l.meters, case when l.keyed then l.concurrency_key end) s
      ) f
      group by f.shard_no, f.queue, f.group_key
    )
    select e.id from ended e
    union all
    select b.id from back b;

  -- Nearly always nobody waits, and this look into an index is all.
  if exists (select from fairq.watches w where w.shard_no = p_shard_no and w.until > p_now) then
    perform fairq._tell_watchers(p_shard_no, array(select t.id from unnest(p_tasks) t), p_now);
  end if;
  if exists (select from unnest(p_tasks) t where t.outcome in ('retry', 'released', 'lease_expired', 'worker_lost')) then
    perform fairq._ring_wishes(p_shard_no, array(select t.id from unnest(p_tasks) t));
  end if;
end;
$$;

-- Tasks that a worker holds in the attempts named, locked, with what they hold. The fencing of finish, release and start.
-- Each is looked up by its id, in the order of the ids: two calls with the same tasks wait for each other and do not deadlock.
-- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
create function fairq._find_held(
  p_shard_no integer, p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_outcomes text[], p_results jsonb[], p_errors jsonb[],
  p_retry_delays interval[], p_now timestamptz
) returns fairq.leaving[]
language plpgsql set search_path = '' as $$
begin
  return (
    select array_agg((b.id, b.ctid, h.ctid, null, null,
      -- No attempt is left, or the next one would come after the deadline.
      case when i.outcome = 'retry' and (h.attempt >= b.max_attempts or r.run_at >= b.expires_at) then 'failed' else i.outcome end,
      i.result, i.error, r.run_at, h.attempt, h.worker_id, h.started_at, h.charge, h.meters, h.counted, h.keyed)::fairq.leaving)
    from (
      select u.id, u.attempt, coalesce(u.outcome, 'succeeded') as outcome, u.result, u.error, u.retry_delay
      from unnest(p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays) as u(id, attempt, outcome, result, error, retry_delay)
      order by u.id
      offset 0
    ) i
    cross join lateral (
      select k.ctid, k.attempt, k.worker_id, k.started_at, k.charge, k.meters, k.counted, k.keyed
      from fairq.held k
      where k.shard_no = p_shard_no and k.id = i.id and k.attempt = i.attempt and k.worker_id = p_worker_id
        and (k.started_at is not null or i.outcome = 'released')
      for update
      offset 0
    ) h
    cross join lateral (
      select t.id, t.ctid, t.queue, t.max_attempts, t.expires_at
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = i.id
      offset 0
    ) b
    cross join lateral (
      select case
        when i.outcome = 'retry' then p_now + coalesce(
          -- An absurd one is as long as the longest: refusing it would refuse the worker's whole batch.
          case when fairq._is_span(i.retry_delay, '366 days') then i.retry_delay when i.retry_delay > interval '0' then interval '366 days' end, (
          select fairq._backoff(q.retry_base, q.retry_cap, h.attempt) from fairq.queues q where q.queue = b.queue
        ))
      end as run_at
      offset 0
    ) r
  );
end;
$$;

-- Tasks that a worker holds, all of them or those among p_ids, at most p_limit, locked. A task that its worker is finishing this very moment is locked and
-- skipped: let it.
-- No index leads from a worker to its tasks: that would be one more to write for each task, and only who leaves or is lost is looked for.
create function fairq._find_of_worker(
  p_shard_no integer, p_worker_id bigint, p_ids bigint[], p_outcome text, p_error jsonb, p_limit integer default 100000
) returns fairq.leaving[]
language plpgsql set search_path = '' as $$
begin
  return (
    select array_agg((h.id, b.ctid, h.ctid, null, null,
      case when p_outcome <> 'worker_lost' then p_outcome when h.started_at is null then 'lease_expired' when h.attempt >= b.max_attempts then 'failed'
        else p_outcome end,
      null, p_error, null, h.attempt, h.worker_id, h.started_at, h.charge, h.meters, h.counted, h.keyed)::fairq.leaving)
    from (
      select k.ctid, k.id, k.attempt, k.worker_id, k.started_at, k.charge, k.meters, k.counted, k.keyed
      from fairq.held k
      where k.shard_no = p_shard_no and k.worker_id = p_worker_id
        and (p_ids is null or k.id = any(p_ids))
      limit p_limit
      for update skip locked
    ) h
    cross join lateral (
      select t.ctid, t.max_attempts
      from fairq.tasks t
      where t.shard_no = p_shard_no and t.id = h.id
      offset 0
    ) b
  );
end;
$$;

-- Waiting tasks among p_ids: in line, scheduled, ready or parked; those that are being popped are locked, and left out. With what they hold.
-- The caller holds the domain.
create function fairq._find_waiting(p_shard_no integer, p_ids bigint[], p_outcome text, p_error jsonb) returns fairq.leaving[]
language plpgsql set search_path = '' as $$
declare
  v_tasks fairq.leaving[];
begin
  select array_agg((b.id, b.ctid, null, r.ctid, k.ctid, p_outcome, null, p_error, null, null, null, null, r.charge, 0,
    coalesce(r.counted, false), coalesce(r.keyed, k.granted, false))::fairq.leaving)
  into v_tasks
  from unnest(p_ids) i(id)
  cross join lateral (
    select t.id, t.ctid
    from fairq.tasks t
    where t.shard_no = p_shard_no and t.id = i.id
    for update skip locked
    offset 0
  ) b
  left join lateral (
    select y.ctid, y.charge, y.counted, y.keyed
    from fairq.ready y
    where y.shard_no = p_shard_no and y.id = i.id
    for update skip locked
    offset 0
  ) r on true
  left join lateral (
    select p.ctid, p.granted, p.turn
    from fairq.parked p
    where p.shard_no = p_shard_no and p.id = i.id
    for update skip locked
    offset 0
  ) k on true
  where not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = i.id offset 0)
    and (r.ctid is not null or not exists (select from fairq.ready y where y.shard_no = p_shard_no and y.id = i.id offset 0))
    and (k.ctid is not null or not exists (select from fairq.parked p where p.shard_no = p_shard_no and p.id = i.id offset 0));

  -- Who leaves with a group's turn at a key passes it on.
  perform fairq._next_turn(p_shard_no, p.concurrency_key, p.queue, p.group_key, p.turn, p_ids)
  from unnest(v_tasks) t
  cross join lateral (
    select y.turn, y.concurrency_key, y.queue, y.group_key
    from fairq.parked y
    where y.shard_no = p_shard_no and y.id = t.id and y.turn is not null
    offset 0
  ) p
  where t.parked is not null;
  return v_tasks;
end;
$$;

-- Ends waiting tasks: cancelled, expired. Returns how many it ended.
create function fairq._end_tasks(p_shard_no integer, p_ids bigint[], p_outcome text, p_error jsonb, p_now timestamptz) returns integer
language plpgsql set search_path = '' as $$
begin
  return (select count(*)::integer from fairq._leave(p_shard_no, fairq._find_waiting(p_shard_no, p_ids, p_outcome, p_error), p_now));
end;
$$;

-- Where a task in flight holds places: with its group, its concurrency key, its queue, the cluster. Each is a counter of its own, and a task that leaves
-- rings each of them. The one list.
create function fairq._scopes(
  p_shard_no integer, p_queue text, p_group_key text, p_counted boolean, p_meters integer, p_concurrency_key text
) returns table (shard_no integer, queue text, group_key text)
language sql immutable rows 1 as $$
  select p_shard_no, p_queue, p_group_key where p_counted
  union all
  select p_shard_no, '#keys', p_concurrency_key where p_concurrency_key is not null
  union all
  select 0, '#meters', 'queue ' || p_queue where p_meters & 1 <> 0
  union all
  select 0, '#meters', 'cluster' where p_meters & 2 <> 0
$$;

-- Announces the ends of those of these tasks that somebody watches; where nobody does, no NOTIFY, which takes a database-wide lock at commit.
-- The callers have settings of their own for their plans; this one has its own, too.
-- Cost: the watches that have not run out, never those behind them.
create function fairq._tell_watchers(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns void
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set enable_seqscan = off set enable_bitmapscan = off
set enable_indexscan = on as $$
declare
  v_watched bigint[];
begin
  select array_agg(distinct w.task_id) into v_watched
  from fairq.watches w
  where w.shard_no = p_shard_no and w.until > p_now and w.task_id = any(p_ids);
  if v_watched is not null then
    -- A notice has its limits: of many it names none, and everybody looks.
    perform pg_notify('fairq_done', case when cardinality(v_watched) <= 200 then array_to_string(v_watched, ',') else '' end);
  end if;
end;
$$;

-- Tasks that come back in line although somebody wished to cancel them: the wish is rung again, since the ring that told of it was heard while the task
-- was held.
create function fairq._ring_wishes(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = on as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select p_shard_no, t.queue, t.group_key, t.id
  from unnest(p_ids) i(id)
  cross join lateral (
    select k.id, k.queue, k.group_key
    from fairq.tasks k
    where k.shard_no = p_shard_no and k.id = i.id
      and not exists (select from fairq.held h where h.shard_no = p_shard_no and h.id = i.id offset 0)
      and exists (select from fairq.cancellations c where c.shard_no = p_shard_no and c.task_id = i.id offset 0)
    offset 0
  ) t;
end;
$$;

-- Deletes rows of the engine's own notes: lanes that were replaced, rings, ticks, keys and wishes that nobody needs any more. By ctid and no
-- other way, see _leave.
-- Returns how many rows it deleted.
-- Locks: the rows named; the caller holds what protects them.
create function fairq._remove(p_shard_no integer, p_table text, p_ctids tid[]) returns integer
language plpgsql set search_path = '' set enable_seqscan = off set enable_bitmapscan = off set enable_indexscan = off as $$
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
    when 'ready' then delete from fairq.ready r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
    when 'idempotency_keys' then delete from fairq.idempotency_keys r where r.shard_no = p_shard_no and r.ctid = any(p_ctids);
  end case;
  get diagnostics v_count = row_count;
  return v_count;
end;
$$;

-- Seconds of worker time that an attempt counts for: from its start to now, an hour at most, so that one that hangs does not banish its group;
-- nothing when it never started.
create function fairq._ran(p_started_at timestamptz, p_now timestamptz) returns double precision
language sql immutable parallel safe
as $$ select least(3600, greatest(0, coalesce(extract(epoch from p_now - p_started_at)::double precision, 0))) $$;

-- Pause before the next attempt: doubled each time, capped, 25 percent of jitter both ways.
create function fairq._backoff(p_base interval, p_cap interval, p_attempt integer) returns interval
language sql as $$
  -- In seconds: 2^30 times a base of days would overflow an interval. It is past every cap that matters, and more would overflow in the end, too.
  select least(extract(epoch from p_cap), extract(epoch from p_base) * power(2, least(p_attempt - 1, 30)))::double precision
    * (0.75 + random() / 2) * interval '1 second'
$$;

-- sql/leave/release_tasks.sql

-- Gives tasks back unfinished, without burning an attempt: shutdown, or a worker that took too many. The next attempt has the next number all the same,
-- and the task may have one more.
-- Returns the ids that were accepted; a stale one is missing.
-- Raises QF011 arrays of different length.
-- Locks: held, the rows named, in the order of their ids.
create function fairq.release_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_shard_no integer default null)
returns setof bigint
language plpgsql rows 100 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  perform fairq._check_lengths(p_worker_id, p_ids, p_attempts);
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    return query
      select l.*
      from fairq._leave(v_shard_no, fairq._find_held(v_shard_no, p_worker_id, p_ids, p_attempts,
        array_fill('released'::text, array[cardinality(p_ids)]), null, null, null, v_now), v_now) l;
  end loop;
end;
$$;
comment on function fairq.release_tasks is
  'Puts tasks of a worker back in line without burning an attempt. Returns the ids accepted.';

-- sql/leave/retire_worker.sql

-- A worker leaves in good order: what it still holds goes back in line without burning an attempt.
-- Unknown workers are ignored: retiring twice does no harm.
-- Locks: the worker's row, waits for a pop of its to end; held, waits for a finish to end.
create function fairq.retire_worker(p_worker_id bigint) returns void
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
begin
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id for update;
    -- What is being finished right now is waited for: should that roll back, nobody would know the worker any more that holds it.
    perform from fairq.held h where h.shard_no = v_shard_no and h.worker_id = p_worker_id order by h.id for update;
    perform fairq._leave(v_shard_no, fairq._find_of_worker(v_shard_no, p_worker_id, null, 'released', null), fairq._now());
    delete from fairq.heartbeats h where h.shard_no = v_shard_no and h.worker_id = p_worker_id;
    delete from fairq.workers w where w.shard_no = v_shard_no and w.worker_id = p_worker_id;
  end loop;
end;
$$;
comment on function fairq.retire_worker is 'Takes a worker off the list and puts what it holds back in line.';

-- sql/leave/retry_task.sql

-- Runs a task again: one that ended otherwise than well, with one attempt more than it had; or one that waits for its back-off or schedule, now.
-- Returns true when there was something to do.
-- Raises QF016: the task ended, and its queue is draining.
-- Locks: the task, and wishes to cancel it.
create function fairq.retry_task(p_id bigint) returns boolean
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
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
      where f.shard_no = v_shard_no and f.id = p_id
        and f.outcome <> 'succeeded'
      returning f.*
    )
    insert into fairq.tasks as t (shard_no, id, sequence, queue, group_key, kind, priority, created_at, run_at, cost, attempt, max_attempts,
      timeout, idempotency_key, concurrency_key, headers, payload)
    select e.shard_no, e.id, v_sequence, e.queue, e.group_key, e.kind, e.priority, e.created_at, v_now, e.cost, e.attempt,
      greatest(e.max_attempts, e.attempt + 1), e.timeout, e.idempotency_key, e.concurrency_key, e.headers, e.payload
    from ended e
    returning t.shard_no, t.queue, t.group_key, t.priority, t.sequence, t.concurrency_key into v_task;
    if found then
      perform fairq._refuse_draining(q.queue) from fairq.queues q where q.queue = v_task.queue and q.draining_at is not null;
      -- It may have ended because somebody wished so: that wish is fulfilled.
      delete from fairq.cancellations c where c.shard_no = v_shard_no and c.task_id = p_id;
      exit;
    end if;

    update fairq.tasks t
    set scheduled = false, sequence = case when t.attempt = 0 then v_sequence else t.sequence end, run_at = v_now
    where t.shard_no = v_shard_no and t.id = p_id
      -- Not just "t.scheduled": with that the planner of a new installation takes the index of due tasks, and reads all of it.
      and t.scheduled is not distinct from true
    returning t.shard_no, t.queue, t.group_key, t.priority, t.sequence, t.concurrency_key into v_task;
    exit when found;
  end loop;
  if v_task.shard_no is null then
    return false;
  end if;

  insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
  values (v_task.shard_no, v_task.queue, v_task.group_key, v_task.priority, v_task.sequence, v_task.concurrency_key is not null);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = v_task.queue and q.notify;
  return true;
end;
$$;
comment on function fairq.retry_task is 'Runs an ended task again, or a scheduled one now. False: there is no such task.';

-- sql/policies/counters.sql

-- Counters: concurrency keys (#keys), queues as a whole and the cluster (#meters). They have a policy and a gate as groups do, kept in lanes, and hear their
-- rings by the same rule; they have no clock, no order and no addresses, and do not run through promotion.

-- Hears what was rung for the counters of a domain, and settles them.
-- Returns the counters that rang, as they are now; the caller writes them.
-- Locks: none; the caller holds the domain.
create function fairq._hear_counters(p_shard_no integer, p_queue text, p_now timestamptz) returns fairq.lanes[]
language plpgsql set search_path = '' as $$
declare
  v_tick fairq.ticks;
  v_heard record;
  v_news fairq.news;
  v_lane fairq.lanes;
  v_lanes fairq.lanes[] := array[]::fairq.lanes[];
begin
  select k.* into v_tick from fairq._tick(p_shard_no, p_queue) k;
  if v_tick.tick is null then
    v_tick := fairq._count_anew(p_shard_no, p_queue);
  end if;
  if not fairq._has_news(v_tick) then
    return v_lanes;
  end if;
  select h.* into v_heard from fairq._hear(v_tick, 10000) h;
  foreach v_news in array coalesce(v_heard.o_news, '{}') loop
    v_lane := fairq._lane(p_shard_no, p_queue, v_news.group_key);
    if v_news.configured or v_lane.policy is null then
      v_lane.policy := fairq._policy_of(p_shard_no, p_queue, v_news.group_key);
    end if;
    v_lane.gate := fairq._settle(v_lane.policy, v_lane.gate, v_news.freed, v_news.failures, v_news.succeeded, p_now);
    v_lane.group_key := v_news.group_key;
    v_lane.finish := coalesce(v_lane.finish, 0);
    v_lanes := v_lanes || v_lane;
  end loop;
  perform fairq._write_tick(v_heard.o_tick);
  return v_lanes;
end;
$$;

-- Writes the next version of a counter. A key of which no place is taken needs none.
-- Locks: lanes, one row replaced; the caller holds the domain.
create function fairq._write_counter(p_shard_no integer, p_queue text, p_group_key text, p_lane fairq.lanes) returns void
language plpgsql set search_path = '' as $$
begin
  if p_queue <> '#keys' or (p_lane.gate).in_flight <> 0 then
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, policy, gate, cursors, admissible)
    values (p_shard_no, p_queue, p_group_key, coalesce(p_lane.version, 0) + 1, 0, coalesce(p_lane.finish, 0), 0, 1, p_lane.policy, p_lane.gate, '{}',
      false);
  end if;
  delete from fairq.lanes l
  where l.shard_no = p_shard_no and l.queue = p_queue and l.group_key = p_group_key and l.version = p_lane.version;
end;
$$;

-- Counts the places of keys or meters anew from the tasks that hold them: in a new installation, after a restored dump, for a repair. One statement counts,
-- removes the rings that these cover, and gives the snapshot: taken a moment apart, a task that left in between would be off the count already, and
-- its ring, which the tick holds for pending, would take it off again.
-- Returns the tick it wrote.
-- Locks: rings and lanes of the domain, which the caller holds. Cost: all tasks in flight; of all shards for the meters.
create function fairq._count_anew(p_shard_no integer, p_queue text) returns fairq.ticks
language plpgsql set search_path = '' as $$
declare
  v_snapshot pg_snapshot;
begin
  delete from fairq.lanes l where l.shard_no = p_shard_no and l.queue = p_queue;
  with forgotten as (
    delete from fairq.rings r where r.shard_no = p_shard_no and r.queue = p_queue
  ),
  holder as (
    select t.queue, t.concurrency_key, h.shard_no, h.meters, h.keyed
    from fairq._shards(case when p_queue = '#keys' then p_shard_no end) x(shard_no)
    join fairq.held h on h.shard_no = x.shard_no
    join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    union all
    select t.queue, t.concurrency_key, r.shard_no, 0, r.keyed
    from fairq.ready r
    join fairq.tasks t on t.shard_no = r.shard_no and t.id = r.id
    where r.shard_no = p_shard_no and r.keyed
    union all
    select k.queue, k.concurrency_key, k.shard_no, 0, true
    from fairq.parked k
    where k.shard_no = p_shard_no and k.granted
  ),
  taken as (
    select s.group_key, count(*) as places
    from holder h
    cross join lateral fairq._scopes(h.shard_no, h.queue, null, false, h.meters, case when h.keyed then h.concurrency_key end) s
    where s.shard_no = p_shard_no and s.queue = p_queue
    group by s.group_key
  ),
  counter as (
    select t.group_key from taken t
    union
    select g.group_key from fairq.groups g where g.shard_no = p_shard_no and g.queue = p_queue
    union
    select m.scope
    from (select 'cluster' union all select 'queue ' || q.queue from fairq.queues q where not q.internal) m(scope)
    where p_queue = '#meters'
      and fairq._meter_policy(m.scope) is distinct from null
    union
    -- What waits for a key is looked at again.
    select k.concurrency_key from fairq.parked k where p_queue = '#keys' and k.shard_no = p_shard_no and k.turn is not null
  ),
  rung as (
    insert into fairq.rings (shard_no, queue, group_key, freed, configured)
    select p_shard_no, p_queue, c.group_key, -coalesce(t.places, 0), true
    from counter c
    left join taken t on t.group_key = c.group_key
  )
  select pg_current_snapshot() into v_snapshot;

  return fairq._write_tick(fairq._blank_tick(p_shard_no, p_queue,
    (select coalesce(max(k.tick), 0) from fairq.ticks k where k.shard_no = p_shard_no and k.queue = p_queue), v_snapshot));
end;
$$;

-- sql/policies/gates.sql

-- What applies to a group: its own settings, else those of its queue; null when nothing limits it, so that ordinary groups pay nothing.
create function fairq._policy(p_queue fairq.queues, p_group fairq.groups) returns fairq.policy
language plpgsql immutable set search_path = '' as $$
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

-- What limits a group, a concurrency key (a group of #keys), a queue or the cluster (#meters), by its settings as they are.
create function fairq._policy_of(p_shard_no integer, p_queue text, p_group_key text) returns fairq.policy
language plpgsql stable set search_path = '' as $$
begin
  if p_queue = '#meters' then
    return fairq._meter_policy(p_group_key);
  end if;
  return (
    select fairq._policy(q, g)
    from fairq.queues q
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = q.queue and g.group_key = p_group_key
    where q.queue = p_queue
  );
end;
$$;

-- As _policy, for a whole queue ('queue NAME') or the cluster: a group of nothing but limits.
create function fairq._meter_policy(p_scope text) returns fairq.policy
language plpgsql stable set search_path = '' as $$
declare
  v_limits fairq.groups;
begin
  if p_scope = 'cluster' then
    select s.max_running into v_limits.max_running from fairq.settings s;
  else
    select q.max_running, q.rate_limit, q.rate_period, q.rate_burst, q.breaker_threshold, q.breaker_cooldown
    into v_limits.max_running, v_limits.rate_limit, v_limits.rate_period, v_limits.rate_burst, v_limits.breaker_threshold, v_limits.breaker_cooldown
    from fairq.queues q
    where q.queue = substr(p_scope, 7);
  end if;
  return fairq._policy(null, v_limits);
end;
$$;

-- Whether the tasks of a group hold places, and tell their lane how they end.
create function fairq._counts(p_policy fairq.policy) returns boolean
language sql immutable parallel safe
as $$ select coalesce((p_policy).max_running, (p_policy).breaker_threshold) is not null $$;

-- The one place that says how many tasks a group may have promoted now, when to look again if none, and why not more. Promotion
-- uses the number and the time, explain_task the reason. A new policy is one more step here, one in _charge and one in _settle.
create function fairq._allowance(p_policy fairq.policy, p_gate fairq.gate, p_now timestamptz) returns fairq.allowance
language plpgsql immutable set search_path = '' as $$
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
    v_allowed := least(v_allowed, p_policy.max_running - coalesce(p_gate.in_flight, 0) - coalesce(p_gate.uncounted, 0));
    if v_allowed < 1 then
      -- Nobody rings for a task that is not counted yet.
      return (0, case when p_gate.uncounted > 0 then p_now + interval '100 milliseconds' end,
        format('%s tasks are in flight, the cap is %s', coalesce(p_gate.in_flight, 0) + coalesce(p_gate.uncounted, 0), p_policy.max_running))::fairq.allowance;
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

-- The gate after p_taken tasks went through it. in_flight is the number of the group's tasks
-- that are counted, so it grows only where tasks are counted (see _counts): what a rate alone lets through nobody would report back.
create function fairq._charge(p_policy fairq.policy, p_gate fairq.gate, p_taken integer, p_now timestamptz) returns fairq.gate
language plpgsql immutable set search_path = '' as $$
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
    p_gate.probe_until := p_now + p_policy.breaker_cooldown;
  end if;
  return p_gate;
end;
$$;

-- The gate after tasks came back that were ready: p_counted of them had a place, and none started, so none is charged to a rate.
create function fairq._uncharge(p_policy fairq.policy, p_gate fairq.gate, p_tasks integer, p_counted integer) returns fairq.gate
language plpgsql immutable set search_path = '' as $$
begin
  if p_gate is not distinct from null then
    return null;
  end if;
  p_gate.in_flight := coalesce(p_gate.in_flight, 0) - p_counted;
  if p_policy.rate_seconds is not null then
    p_gate.rate_at := p_gate.rate_at - p_tasks * p_policy.rate_seconds * interval '1 second';
  end if;
  p_gate.probe_until := null;
  return p_gate;
end;
$$;

-- The gate after the news of tasks that left: places come free; failures in a row open the breaker, a success closes it. p_failures
-- counts those after the last success, p_succeeded says whether there was one.
-- Settings may have changed since. Places are kept even without any, while tasks that hold one are about to report it; nothing left to keep is null.
create function fairq._settle(
  p_policy fairq.policy, p_gate fairq.gate, p_freed integer, p_failures integer, p_succeeded boolean, p_now timestamptz
) returns fairq.gate
language plpgsql immutable set search_path = '' as $$
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

-- The lane of a group as it is: the newest version, one step in lanes_pkey. All null when there is none.
create function fairq._lane(p_shard_no integer, p_queue text, p_group_key text) returns fairq.lanes
language plpgsql stable set search_path = '' as $$
declare
  v_lane fairq.lanes;
begin
  select l.* into v_lane
  from fairq.lanes l
  where l.shard_no = p_shard_no and l.queue = p_queue and l.group_key = p_group_key
  order by l.version desc
  limit 1;
  return v_lane;
end;
$$;

-- sql/policies/keys.sql

-- Concurrency keys. A key is a counter (a lane of #keys, whose gate says how many places are taken) with a list of those who wait for it. Only a task that
-- is served now takes a place, or one that was given a place that came free; each says so in its own row, and gives back what that row says.

-- The next tasks of a lane some of which have concurrency keys, in order: those without a key, and those that get a place of their key right now. One whose
-- key is taken is parked and passed over: it holds nobody up, not even its own group. Each is parked once per wait, and a pass parks no more than
-- its share: then the lane steps back until the next pass, so that nobody waits for it, and rings for that.
-- Beyond p_reach no place is taken: the lane stops there until a pop gets that far. So does, where a rate is charged, every task.
-- One row more than p_quota is returned, which is not looked at: where the lane goes on.
-- Locks: lanes of #keys, whose domain the caller holds, too; parked.
-- Cost: tasks_line_idx from the cursors, p_quota rows and those that are parked.
create function fairq._take_keys(
  p_tick fairq.ticks, p_group_key text, p_cursors fairq.cursor[], p_weight double precision, p_pace fairq.pace, p_quota integer, p_finish bigint,
  p_reach bigint, p_is_rated boolean, p_now timestamptz
) returns table (id bigint, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, keyed boolean, stops boolean,
  meets_key boolean, yields boolean, touched bigint, is_open boolean)
language plpgsql rows 10 set search_path = '' as $$
declare
  v_cursor fairq.cursor;
  v_task record;
  v_found integer := 0;
  v_parked integer := 0;
  v_granted boolean;
begin
  meets_key := true;
  yields := false;
  foreach v_cursor in array p_cursors loop
    for v_task in
      select t.id, t.priority, t.sequence, t.kind, t.cost, t.concurrency_key, t.expires_at is not null and t.expires_at <= p_now as is_expired
      from fairq.tasks t
      where t.shard_no = p_tick.shard_no and t.queue = p_tick.queue and t.group_key = p_group_key and not t.scheduled
        and t.priority = v_cursor.priority
        and t.sequence >= v_cursor.sequence
      union all
      select t.id, t.priority, t.sequence, t.kind, t.cost, t.concurrency_key, t.expires_at is not null and t.expires_at <= p_now as is_expired
      from fairq.tasks t
      where v_cursor.is_open
        and t.shard_no = p_tick.shard_no
        and t.queue = p_tick.queue
        and t.group_key = p_group_key
        and not t.scheduled
        and t.priority < v_cursor.priority
      order by priority desc, sequence
    loop
      -- One that is parked was looked at before; it is met again when it was given its key.
      v_granted := null;
      if v_task.concurrency_key is not null then
        select k.granted into v_granted from fairq.parked k where k.shard_no = p_tick.shard_no and k.id = v_task.id;
      end if;
      -- One that was taken before may be held, and its holder may end it, or put it off, between the loop's snapshot and this look: body and holder are
      -- looked at together, once more.
      continue when not v_granted or (v_granted is null and v_task.sequence <= v_cursor.touched and not exists (
        select
        from fairq.tasks b
        where b.shard_no = p_tick.shard_no and b.id = v_task.id and not b.scheduled
          and fairq._is_waiting(p_tick.shard_no, b.id)
      ));
      id := v_task.id;
      priority := v_task.priority;
      sequence := v_task.sequence;
      touched := v_cursor.touched;
      is_open := v_cursor.is_open;
      is_expired := v_task.is_expired;
      keyed := v_task.concurrency_key is not null and not is_expired;
      charge := case when p_pace is distinct from null then fairq._expected(p_pace, v_task.kind, v_task.cost) end;
      step := case when is_expired then 0 else fairq._step(coalesce(charge, v_task.cost), p_weight) end;
      stops := v_found >= p_quota
        or (not is_expired and v_granted is null and (keyed or p_is_rated) and p_finish >= p_reach)
        or v_parked >= 500;
      yields := v_parked >= 500;
      if v_granted and not stops and not is_expired then
        delete from fairq.parked k where k.shard_no = p_tick.shard_no and k.id = v_task.id;
      elsif keyed and v_granted is null and not stops and not fairq._take_place(p_tick.shard_no, '#keys', v_task.concurrency_key, p_now) then
        perform fairq._park(p_tick.shard_no, p_tick.queue, p_group_key, v_task.concurrency_key, v_task.id, v_task.priority, v_task.sequence);
        v_parked := v_parked + 1;
        continue;
      end if;
      return next;
      if yields then
        insert into fairq.rings (shard_no, queue, group_key, keyed) values (p_tick.shard_no, p_tick.queue, p_group_key, true);
      end if;
      if stops then
        return;
      end if;
      v_found := v_found + 1;
      p_finish := p_finish + step;
    end loop;
  end loop;
end;
$$;

-- Takes places of a concurrency key, or of a meter, if there are as many. A key nobody used yet has no lane: its policy is looked up then.
-- Returns false when there are not.
-- Locks: lanes, one row replaced; the caller holds the domain of p_queue.
create function fairq._take_place(p_shard_no integer, p_queue text, p_group_key text, p_now timestamptz, p_places integer default 1)
returns boolean
language plpgsql set search_path = '' as $$
declare
  v_lane fairq.lanes := fairq._lane(p_shard_no, p_queue, p_group_key);
begin
  if v_lane.policy is null then
    v_lane.policy := fairq._policy_of(p_shard_no, p_queue, p_group_key);
  end if;
  if v_lane.policy is null then
    return true;
  end if;
  if (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks < p_places then
    return false;
  end if;
  v_lane.gate := fairq._charge(v_lane.policy, v_lane.gate, p_places, p_now);
  perform fairq._write_counter(p_shard_no, p_queue, p_group_key, v_lane);
  return true;
end;
$$;

-- Parks a task whose key has no place. The first of its group at this key gets the group's next turn there; groups take turns by their weights, as they do
-- in their queue.
create function fairq._park(
  p_shard_no integer, p_queue text, p_group_key text, p_concurrency_key text, p_id bigint, p_priority integer, p_sequence bigint
) returns void
language plpgsql set search_path = '' as $$
declare
  v_first record;
begin
  select k.id, k.priority, k.sequence, k.turn into v_first
  from fairq.parked k
  where k.shard_no = p_shard_no and k.concurrency_key = p_concurrency_key and k.queue = p_queue and k.group_key = p_group_key and not k.granted
  order by k.priority desc, k.sequence
  limit 1;
  if not found then
    -- Who comes new to a key starts at its clock.
    v_first.turn := coalesce((fairq._lane(p_shard_no, '#keys', p_concurrency_key)).finish, 0);
  elsif (-v_first.priority, v_first.sequence) < (-p_priority, p_sequence) then
    v_first.turn := null;
  else
    update fairq.parked k set turn = null where k.shard_no = p_shard_no and k.id = v_first.id;
  end if;
  insert into fairq.parked (shard_no, id, queue, group_key, concurrency_key, priority, sequence, turn)
  values (p_shard_no, p_id, p_queue, p_group_key, p_concurrency_key, p_priority, p_sequence, v_first.turn);
end;
$$;

-- Hears what came free, and gives each place to one who waits for it, in the order of their turns. Who is given a place has it from this statement on, in
-- its own row; it rings, and its lane places it next.
-- Who could not go on (its group is paused, capped, limited) goes back in line instead, and is met again when its group may: nothing waits for a key
-- that has room, and nothing holds one that cannot use it. So each is woken once per wait, and a place that comes free costs the same whoever waits.
-- Locks: #keys, which the caller holds; parked rows with "skip locked", for purge and cancel hold those of other queues.
-- Cost: keys that rang; parked_turn_idx from the key's clock, one step per place and per group that cannot go on, 1000 at most per key and pass.
create function fairq._open_keys(p_shard_no integer, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
declare
  v_key fairq.lanes;
  v_first record;
  v_granted integer;
begin
  foreach v_key in array fairq._hear_counters(p_shard_no, '#keys', p_now) loop
    v_granted := 0;
    for v_round in 1 .. 1001 loop
      exit when (fairq._allowance(v_key.policy, v_key.gate, p_now)).tasks <= v_granted;
      select k.id, k.queue, k.group_key, k.priority, k.sequence, k.turn into v_first
      from fairq.parked k
      where k.shard_no = p_shard_no and k.concurrency_key = v_key.group_key and k.turn >= v_key.finish
      order by k.turn, k.id
      limit 1
      for update skip locked;
      -- Those that are locked are leaving, and more than fit into one pass wait for the next.
      if not found or v_round > 1000 then
        insert into fairq.rings (shard_no, queue, group_key)
        select p_shard_no, '#keys', v_key.group_key
        where exists (
          select
          from fairq.parked k
          where k.shard_no = p_shard_no and k.concurrency_key = v_key.group_key and k.turn >= v_key.finish
        );
        exit;
      end if;
      -- The clock of the key: not past one that is locked, which may stay.
      select k.turn into v_key.finish
      from fairq.parked k
      where k.shard_no = p_shard_no and k.concurrency_key = v_key.group_key and k.turn >= v_key.finish
      order by k.turn
      limit 1;
      perform fairq._next_turn(p_shard_no, v_key.group_key, v_first.queue, v_first.group_key, v_first.turn, array[v_first.id]);
      if fairq._may_go_on(p_shard_no, v_first.queue, v_first.group_key, p_now) then
        update fairq.parked k set granted = true, turn = null where k.shard_no = p_shard_no and k.id = v_first.id;
        v_granted := v_granted + 1;
      else
        delete from fairq.parked k where k.shard_no = p_shard_no and k.id = v_first.id;
      end if;
      insert into fairq.rings (shard_no, queue, group_key, priority, sequence, keyed)
      values (p_shard_no, v_first.queue, v_first.group_key, v_first.priority, v_first.sequence, true);
    end loop;
    v_key.gate := fairq._charge(v_key.policy, v_key.gate, v_granted, p_now);
    perform fairq._write_counter(p_shard_no, '#keys', v_key.group_key, v_key);
  end loop;
end;
$$;

-- The turn of a group at a key goes on from tasks that leave to its next one that waits there, a step further by the group's weight.
create function fairq._next_turn(p_shard_no integer, p_concurrency_key text, p_queue text, p_group_key text, p_turn bigint, p_leaving bigint[])
returns void
language plpgsql set search_path = '' as $$
begin
  update fairq.parked n
  set turn = p_turn + fairq._step(1, (
    select coalesce(g.weight, q.weight)
    from fairq.queues q
    left join fairq.groups g on g.shard_no = p_shard_no and g.queue = q.queue and g.group_key = p_group_key
    where q.queue = p_queue
  ))
  where n.shard_no = p_shard_no
    and n.id = (
      select k.id
      from fairq.parked k
      where k.shard_no = p_shard_no and k.concurrency_key = p_concurrency_key and k.queue = p_queue and k.group_key = p_group_key and not k.granted
        and k.id <> all(p_leaving)
      order by k.priority desc, k.sequence
      limit 1
    );
end;
$$;

-- Whether a group could serve a task now, by what its lane last knew and its settings say. In a paused queue none can.
create function fairq._may_go_on(p_shard_no integer, p_queue text, p_group_key text, p_now timestamptz) returns boolean
language plpgsql set search_path = '' as $$
declare
  v_policy fairq.policy;
begin
  if exists (select from fairq.queues q where q.queue = p_queue and q.paused_at is not null) then
    return false;
  end if;
  v_policy := fairq._policy_of(p_shard_no, p_queue, p_group_key);
  return v_policy is not distinct from null
    or (fairq._allowance(v_policy, (fairq._lane(p_shard_no, p_queue, p_group_key)).gate, p_now)).tasks > 0;
end;
$$;

-- Tasks that were given a key, and whose group cannot go on after all, give it back and stand in line again.
-- Locks: parked; the caller holds the domain and #keys.
-- Cost: parked_granted_idx, the tasks of the queue that were given a key and not placed yet.
create function fairq._take_keys_back(p_shard_no integer, p_queue text, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
begin
  with back as (
    delete from fairq.parked k
    where k.shard_no = p_shard_no and k.queue = p_queue and k.granted
      and not fairq._may_go_on(p_shard_no, p_queue, k.group_key, p_now)
    returning k.concurrency_key
  )
  insert into fairq.rings (shard_no, queue, group_key, freed)
  select p_shard_no, '#keys', b.concurrency_key, count(*)
  from back b
  group by b.concurrency_key;
end;
$$;

-- sql/policies/meters.sql

-- Caps, rates and breakers of a whole queue and of the cluster, asked at pop: how many tasks may be popped now. Takes the lock of #meters, so pops of such
-- queues go one after the other; other queues never come here.
-- Hears first what left since, so what it says is exact.
-- Returns at most p_limit.
-- Raises QF015: claim leases and a cluster cap exclude each other.
-- Locks: the domain #meters, waits for it; until the transaction ends.
create function fairq._meter(p_queue text, p_limit integer, p_now timestamptz, p_claim_lease interval) returns integer
language plpgsql set search_path = '' as $$
declare
  v_lane fairq.lanes;
  v_scope text;
begin
  perform fairq._settle_meters(p_now);
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

-- Hears what was rung for the meters, and writes them.
-- Locks: the domain #meters, waits for it; until the transaction ends.
create function fairq._settle_meters(p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
declare
  v_meter fairq.lanes;
begin
  perform fairq._lock_domain(0, '#meters', true);
  foreach v_meter in array fairq._hear_counters(0, '#meters', p_now) loop
    perform fairq._write_counter(0, '#meters', v_meter.group_key, v_meter);
  end loop;
end;
$$;

-- In which meters a task of this queue holds a place: 1 its queue, 2 the cluster.
create function fairq._meters_of(p_queue text) returns integer
language plpgsql stable set search_path = '' as $$
begin
  return ((case when fairq._counts((fairq._lane(0, '#meters', 'queue ' || p_queue)).policy) then 1 else 0 end)
    + (case when fairq._counts((fairq._lane(0, '#meters', 'cluster')).policy) then 2 else 0 end))::integer;
end;
$$;

-- Takes the places of tasks just popped. The caller holds #meters since it asked.
create function fairq._charge_meters(p_queue text, p_popped integer, p_now timestamptz) returns void
language plpgsql set search_path = '' as $$
begin
  perform fairq._take_place(0, '#meters', 'queue ' || p_queue, p_now, p_popped);
  perform fairq._take_place(0, '#meters', 'cluster', p_now, p_popped);
end;
$$;

-- sql/policies/time.sql

-- Seconds that a task is expected to take: the estimate of its group and kind; the cost it was created with while there is none.
create function fairq._expected(p_pace fairq.pace, p_kind text, p_cost double precision) returns double precision
language sql immutable parallel safe
as $$ select coalesce((select e.seconds from unnest(p_pace.estimates) e where e.kind = p_kind), p_cost) $$;

-- The pace of a lane whose last address is in this block; null: where it was.
create function fairq._last_block(p_pace fairq.pace, p_block bigint) returns fairq.pace
language sql immutable parallel safe
as $$ select case when p_pace is distinct from null then (coalesce(p_block, p_pace.last_block), p_pace.credit, p_pace.estimates)::fairq.pace end $$;

-- Where a lane of a queue that shares time goes on after its attempts took p_correction seconds more than was charged for them, or less.
-- What was charged too much is given back as far as p_clock and the last address given out: tasks of a group keep their order. The rest is credit, for the
-- next correction; without it a group whose tasks differ in length would lose a little each time. Credit is worth sixteen tasks at most, and is lost when the group
-- has nothing waiting, or a group whose estimate was far too high would come with a flood.
create function fairq._correct(
  p_finish bigint, p_pace fairq.pace, p_correction double precision, p_ran fairq.estimate[], p_weight double precision, p_clock bigint,
  p_was_idle boolean
) returns table (finish bigint, pace fairq.pace)
language plpgsql immutable rows 1 set search_path = '' as $$
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

-- The estimates of a lane, kept up: per kind the mean of the first 16 attempts, then a moving one. One attempt counts as four times the estimate at most, and as a quarter
-- at least: a hang among quick tasks would make the next ones dear. What it really took is charged all the same, by the correction.
-- The 32 kinds seen last are kept.
create function fairq._learn(p_known fairq.estimate[], p_ran fairq.estimate[]) returns fairq.estimate[]
language plpgsql immutable set search_path = '' as $$
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

-- sql/control/checks_and_locks.sql

-- Raises QF007 when a limit is not 1 to 100000.
create function fairq._check_limit(p_limit integer) returns void
language plpgsql immutable set search_path = '' as $$
begin
  if p_limit is null or p_limit < 1 or p_limit > 100000 then
    raise exception 'the limit % is out of range', coalesce(p_limit::text, 'null')
      using errcode = 'QF007', hint = 'Ask for 1 to 100000 tasks.';
  end if;
end;
$$;

-- Promotion and pop have to see what others committed a moment ago.
-- Raises QF005 in REPEATABLE READ and SERIALIZABLE.
create function fairq._check_isolation(p_queue text) returns void
language plpgsql stable set search_path = '' as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'queue "%" is promoted and popped in READ COMMITTED, this transaction is %', p_queue, upper(current_setting('transaction_isolation'))
      using errcode = 'QF005',
        hint = 'Call it in a transaction of its own. Creating and cancelling tasks work in every isolation level.';
  end if;
end;
$$;

-- The shard named, or all of them.
create function fairq._shards(p_shard_no integer) returns setof integer
language sql stable rows 1 as $$
  select generate_series(coalesce(p_shard_no, 0), coalesce(p_shard_no, s.shard_count - 1))
  from fairq.settings s
$$;

-- Takes the lock that makes promotion one at a time, until the end of the transaction.
-- Returns false when another session holds it and p_wait is false.
-- The snapshot of the caller's next statement is taken after the lock, so it sees all that the previous promotion wrote:
-- this is why promotion insists on READ COMMITTED.
-- Raises QF005 in another isolation level, QF003 when the queue is unknown.
-- Locks: domains, one row.
create function fairq._lock_domain(p_shard_no integer, p_queue text, p_wait boolean) returns boolean
language plpgsql set search_path = '' as $$
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

-- Waits for the lock of a domain, and takes it, but not for longer than somebody who promotes would hold it: a transaction that promoted and stays open must
-- not keep every pop waiting.
-- Returns whether it got the lock.
-- Locks: the domain, until the transaction ends.
create function fairq._await_domain(p_shard_no integer, p_queue text) returns boolean
language plpgsql set search_path = '' set lock_timeout = '200ms' as $$
begin
  perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  return true;
exception when lock_not_available or deadlock_detected then
  return false;
end;
$$;

-- Raises QF003: the queue is unknown.
create function fairq._refuse_queue(p_queue text) returns void
language plpgsql stable set search_path = '' as $$
begin
  if p_queue is null then
    raise exception 'no queue is named' using errcode = 'QF003', hint = 'For example: default. A null names none.';
  end if;
  raise exception 'there is no queue "%"', p_queue
    using errcode = 'QF003',
      hint = format('Create it with: select fairq.configure_queue(%L);', p_queue);
end;
$$;

-- Raises QF016: the queue is draining.
create function fairq._refuse_draining(p_queue text) returns void
language plpgsql stable set search_path = '' as $$
begin
  raise exception 'queue "%" is draining and takes no new tasks', p_queue
    using errcode = 'QF016',
      hint = format('It takes them again after: select fairq.resume_queue(%L);', p_queue);
end;
$$;

-- Raises QF001 or QF003 when a group cannot be meant.
create function fairq._check_group(p_queue text, p_group_key text) returns void
language plpgsql stable set search_path = '' as $$
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

-- Raises QF011 when ids and attempts do not pair.
create function fairq._check_lengths(p_worker_id bigint, p_ids bigint[], p_attempts integer[]) returns void
language plpgsql immutable set search_path = '' as $$
begin
  if coalesce(cardinality(p_ids), 0) <> coalesce(cardinality(p_attempts), 0) then
    raise exception 'worker % names % tasks and % attempts', p_worker_id, coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)
      using errcode = 'QF011', hint = 'Both arrays have one element per task.';
  end if;
end;
$$;

-- The lock of the concurrency keys, which belong to all queues of the shard; it is held while places are taken. A pop waits for it for a moment only: it
-- may hold the meters, for which another transaction waits that holds the keys, because it popped another queue before.
create function fairq._lock_keys(p_shard_no integer, p_wait boolean) returns boolean
language plpgsql set search_path = '' as $$
begin
  return fairq._lock_domain(p_shard_no, '#keys', p_wait) or (not p_wait and fairq._await_domain(p_shard_no, '#keys'));
end;
$$;

-- Raises QF009 when a length of time is not positive, or longer than it may be: an infinite or absurd one, once stored, would make other functions fail.
create function fairq._check_length(p_what text, p_length interval, p_most interval) returns void
language plpgsql immutable set search_path = '' as $$
begin
  if p_length <= interval '0' or not fairq._is_span(p_length, p_most) then
    raise exception '% of % is out of range', p_what, p_length
      using errcode = 'QF009', hint = format('More than nothing, at most %s.', p_most);
  end if;
end;
$$;

-- sql/control/configure_cluster.sql

-- Changes settings of the installation, which are columns of fairq.settings: an absent one stays as it is, a null takes one away, so that the default holds.
-- max_running caps the tasks in flight over all queues and workers. It excludes claim leases (QF015 at pop).
-- The number of shards can change only while there are no tasks: it decides where a task is stored.
-- Returns the settings in force.
-- Raises QF013 when there are tasks, QF007 bad number, QF014 an unknown setting.
-- Locks: settings; #meters and held tasks when the cap changes.
create function fairq.configure_cluster(p_settings jsonb default '{}') returns fairq.settings
language plpgsql set search_path = '' as $$
declare
  v_old fairq.settings;
  v_new fairq.settings;
  v_changes jsonb;
begin
  select s.* into v_old from fairq.settings s for update;
  v_changes := fairq._check_settings('the cluster', 'fairq.settings', to_jsonb(v_old), p_settings);
  v_new := jsonb_populate_record(v_old, v_changes);
  if v_new.shard_count <> v_old.shard_count then
    lock table fairq.tasks in share row exclusive mode;
    if exists (select from fairq.tasks) or exists (select from fairq.finished_tasks) or exists (select from fairq.workers) then
      raise exception 'the number of shards cannot change from % to % while there are tasks or workers', v_old.shard_count, v_new.shard_count
        using errcode = 'QF013', hint = 'It decides where a task is stored. Install a second schema or database with the new number and let this one run empty.';
    end if;
    delete from fairq.domains d where d.shard_no >= v_new.shard_count;
    delete from fairq.maintenance m where m.shard_no >= v_new.shard_count;
    perform fairq._open_domain(s.shard_no, q.queue) from generate_series(0, v_new.shard_count - 1) s(shard_no) cross join fairq.queues q;
    insert into fairq.maintenance (shard_no)
    select s.shard_no from generate_series(0, v_new.shard_count - 1) s(shard_no)
    on conflict do nothing;
  end if;

  if v_changes ? 'max_running' then
    perform fairq._settle_meters(fairq._now());
  end if;
  if v_changes <> '{}' then
    execute 'update fairq.settings s set ' || fairq._assignments(v_changes) using v_new;
  end if;
  if v_changes ? 'max_running' then
    perform fairq._apply_meter('cluster', null);
  end if;
  return v_new;
end;
$$;
comment on function fairq.configure_cluster is 'Changes settings of the installation; an absent one stays, a null takes one away.';

-- sql/control/configure_group.sql

-- Changes settings of one group of a queue, which are columns of fairq.groups: an absent one stays as it is, a null takes one away, so that the queue's
-- default holds. Takes effect with the next promotion, which the next pop makes. Groups need no settings: unknown ones have those of their queue.
-- A first cap or breaker counts the tasks that are in flight already.
-- Returns the settings in force.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED, QF007 a number out of range, QF009 a time, QF014 an unknown setting.
-- Locks: settings; groups, one row; then the domain, if nobody promotes. Waits for no pop.
create function fairq.configure_group(p_queue text, p_group_key text, p_settings jsonb default '{}') returns fairq.groups
language plpgsql set search_path = '' as $$
declare
  v_group fairq.groups;
  v_shard_no integer;
begin
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s for update;
  perform fairq._check_group(p_queue, p_group_key);
  v_group := fairq._set_limits(v_shard_no, p_queue, p_group_key, format('group "%s"', p_group_key), p_settings);
  -- Hears the ring: what is ready goes back in line, and stands there under the new limits. Who promotes right now is not waited for: the next pass hears it.
  perform fairq._promote(v_shard_no, p_queue, 1, false);
  return v_group;
end;
$$;
comment on function fairq.configure_group is 'Changes settings of one group; an absent one stays, a null takes one away.';

-- sql/control/configure_key.sql

-- How many tasks with a concurrency key may be in flight at once, over all queues and groups of a shard. Keys need no settings: an unknown one has one place.
-- Returns the settings in force.
-- Raises QF006 key, QF005 not READ COMMITTED, QF007 a number out of range, QF014 an unknown setting.
-- Locks: settings; groups, one row; the domain #keys, if nobody holds it.
create function fairq.configure_key(p_concurrency_key text, p_settings jsonb default '{}') returns fairq.groups
language plpgsql set search_path = '' as $$
declare
  v_shard_no integer;
  v_key fairq.groups;
begin
  perform from fairq.settings s for update;
  if p_concurrency_key is null or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500 then
    raise exception 'a concurrency key has 1 to 500 bytes' using errcode = 'QF006', hint = 'Name the resource that tasks share.';
  end if;
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    v_key := fairq._set_limits(v_shard_no, '#keys', p_concurrency_key, format('concurrency key "%s"', p_concurrency_key), p_settings, '{max_running}');
    -- Hears the ring: what a higher cap lets in may go on now.
    if fairq._lock_domain(v_shard_no, '#keys', false) then
      perform fairq._open_keys(v_shard_no, fairq._now());
    end if;
  end loop;
  return v_key;
end;
$$;
comment on function fairq.configure_key is 'Changes how many tasks with a concurrency key may be in flight.';

-- sql/control/configure_queue.sql

-- Creates a queue, or changes its settings, which are columns of fairq.queues: an absent one stays as it is, a null takes one away, so that the default holds.
-- group_* and weight are the defaults of its groups; max_running, rate_* and breaker_* limit the queue as a whole. Takes effect with the next promotion and pop.
-- Returns the settings in force.
-- Raises QF005 not READ COMMITTED, QF006 bad name, QF007 bad number, QF009 bad interval, QF014 an unknown setting.
-- Locks: settings; queues, one row; where limits change, #meters, waits for it, and the domains of the queue, if nobody promotes.
create function fairq.configure_queue(p_queue text, p_settings jsonb default '{}') returns fairq.queues
language plpgsql set search_path = '' as $$
declare
  v_queue fairq.queues;
  v_is_new boolean;
  v_changes jsonb;
  v_groups_change boolean;
  v_meter_changes boolean;
begin
  perform from fairq.settings s for update;
  if p_queue is null or p_queue = '' or octet_length(p_queue) > 200 or p_queue like '#%' then
    raise exception 'the name of a queue has 1 to 200 bytes and does not begin with #' using errcode = 'QF006', hint = 'For example: documents.';
  end if;
  insert into fairq.queues (queue) values (p_queue) on conflict do nothing;
  v_is_new := found;
  perform fairq._open_domain(s.shard_no, p_queue) from fairq._shards(null) s(shard_no);
  -- Nobody else changes settings now, so the row need not be locked while domains are waited for: a queue can be paused all the time.
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  v_changes := fairq._check_settings(format('queue "%s"', p_queue), 'fairq.queues', to_jsonb(v_queue), p_settings);
  select coalesce(bool_or(c.name ~ '^(weight$|fairness$|group_)'), false), coalesce(bool_or(c.name ~ '^(max_running$|rate_|breaker_)'), false)
  into v_groups_change, v_meter_changes
  from jsonb_object_keys(v_changes) c(name);

  -- The meters first hear all there is to hear under the old settings.
  if v_meter_changes then
    perform fairq._settle_meters(fairq._now());
  end if;
  if v_changes <> '{}' then
    execute 'update fairq.queues q set ' || fairq._assignments(v_changes) || ' where q.queue = $2'
    using jsonb_populate_record(v_queue, v_changes), p_queue;
  end if;
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;

  if v_groups_change and not v_is_new then
    -- The groups that have a lane look their settings up again, and so do those that have tasks in flight; others will when they get one.
    insert into fairq.rings (shard_no, queue, group_key, configured)
    select l.shard_no, l.queue, l.group_key, true
    from fairq._shards(null) s(shard_no)
    join fairq.lanes l on l.shard_no = s.shard_no and l.queue = p_queue
    union
    select t.shard_no, t.queue, t.group_key, true
    from fairq._shards(null) s(shard_no)
    join fairq.held h on h.shard_no = s.shard_no
    join fairq.tasks t on t.shard_no = h.shard_no and t.id = h.id
    where t.queue = p_queue;
    perform fairq._promote(s.shard_no, p_queue, 1, false) from fairq._shards(null) s(shard_no);
  end if;
  if v_meter_changes then
    perform fairq._apply_meter('queue ' || p_queue, p_queue);
  elsif v_is_new then
    perform fairq._set_metered();
  end if;
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if v_queue.notify and (v_groups_change or v_meter_changes) then
    perform pg_notify('fairq', p_queue);
  end if;
  return v_queue;
end;
$$;
comment on function fairq.configure_queue is 'Creates a queue, or changes its settings; an absent one stays, a null takes one away.';

-- sql/control/drain_queue.sql

-- Lets a queue run empty: new tasks are refused (QF016) until it is resumed, what is there is served to the end, retries and schedules included. Costs the
-- same however much that is. Whether it is empty fairq.queue_stats tells. A transaction that created tasks before this one committed is let through.
-- Raises QF003 unknown queue.
-- Locks: queues, one row.
create function fairq.drain_queue(p_queue text) returns void
language plpgsql set search_path = '' as $$
begin
  update fairq.queues q set draining_at = coalesce(q.draining_at, fairq._now()) where q.queue = p_queue and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
end;
$$;
comment on function fairq.drain_queue is 'Refuses new tasks of a queue and serves those that are there, until it is resumed.';

-- sql/control/pause_group.sql

-- Pauses a group: none of its tasks is promoted, those already ready go back in line with the next promotion; running ones go on. Costs the same however
-- much it has waiting.
-- Raises QF001 group key, QF003 unknown queue.
-- Locks: groups, one row.
create function fairq.pause_group(p_queue text, p_group_key text) returns void
language plpgsql set search_path = '' as $$
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
comment on function fairq.pause_group is 'Stops serving a group until it is resumed.';

-- "Look at this group": its settings changed. Workers that sleep are woken.
create function fairq._ring_group(p_shard_no integer, p_queue text, p_group_key text) returns void
language plpgsql set search_path = '' as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, configured) values (p_shard_no, p_queue, p_group_key, true);
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
end;
$$;

-- sql/control/pause_queue.sql

-- Pauses a queue: pops return nothing until it is resumed. Creating goes on, running tasks go on.
-- Raises QF003 unknown queue.
-- Locks: queues, one row.
create function fairq.pause_queue(p_queue text) returns void
language plpgsql set search_path = '' as $$
begin
  update fairq.queues q set paused_at = coalesce(q.paused_at, fairq._now()) where q.queue = p_queue and not q.internal;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
end;
$$;
comment on function fairq.pause_queue is 'Stops serving a queue until it is resumed.';

-- sql/control/purge_group.sql

-- Cancels everything a group has waiting: in line, ready, scheduled and parked tasks. Claimed and running ones are left; cancel_task is for those.
-- Ready ones are cancelled by promotion, which gives the group its addresses back: it owes nothing for tasks it did not run.
-- Returns how many tasks it ended.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the domain, waits for it; the tasks, those being popped left out. Cost: what the group has waiting, and the scheduled tasks of the queue.
create function fairq.purge_group(p_queue text, p_group_key text) returns integer
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
  v_ready bigint[];
  v_ended integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  perform fairq._lock_domain(v_shard_no, p_queue, true);
  v_ready := array(
    select r.id
    from fairq.ready r
    where r.shard_no = v_shard_no and r.queue = p_queue and r.position >= 0 and r.group_key = p_group_key
    for update skip locked
  );
  v_ended := cardinality(v_ready) + fairq._end_tasks(v_shard_no, array(
    select t.id
    from fairq.tasks t
    where t.shard_no = v_shard_no and t.queue = p_queue and t.group_key = p_group_key and t.id <> all(v_ready)
  ), 'cancelled', null, v_now);
  insert into fairq.cancellations (shard_no, task_id, requested_at)
  select v_shard_no, r.id, v_now
  from unnest(v_ready) r(id);
  insert into fairq.rings (shard_no, queue, group_key, cancelled_id)
  select v_shard_no, p_queue, p_group_key, r.id
  from unnest(v_ready) r(id);
  -- One pass hears five thousand rings; others may wait before these.
  for v_round in 1 .. 1000 loop
    perform fairq._promote(v_shard_no, p_queue, 1, true);
    exit when not exists (select from fairq._tick(v_shard_no, p_queue) k where fairq._has_news(k));
  end loop;
  return v_ended;
end;
$$;
comment on function fairq.purge_group is 'Cancels everything a group has waiting. Returns how many tasks that were.';

-- sql/control/rate_usage.sql

-- How much of a rate is used: of a group's, its own or the one its queue gives to each; with p_group_key null, of the rate of the whole queue.
-- A rate is charged when tasks are popped, never by looking.
-- Returns one row; none where no rate holds. available tasks may go at once; when there are none, the next one may at next_at. At full_at all
-- of the burst is there again; null: it is.
-- Raises QF001 group key, QF003 unknown queue.
-- Cost: the settings of the group and its lane, one index step each.
create function fairq.rate_usage(p_queue text, p_group_key text default null)
returns table (
  queue text, group_key text, rate_limit integer, rate_period interval, rate_burst integer, used integer, available integer, next_at timestamptz,
  full_at timestamptz
)
language plpgsql rows 1 set search_path = '' as $$
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
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  select g.* into v_group
  from fairq.groups g
  where g.shard_no = v_lane.shard_no and g.queue = v_lane.queue and g.group_key = v_lane.group_key;
  -- The settings as they are now, of which the lane may not have heard yet.
  v_policy := case when v_lane.queue = '#meters' then fairq._meter_policy(v_lane.group_key) else fairq._policy(v_queue, v_group) end;
  if v_policy.rate_seconds is null then
    return;
  end if;

  v_lane := fairq._lane(v_lane.shard_no, v_lane.queue, v_lane.group_key);
  v_gate.rate_at := (fairq._settle(v_policy, v_lane.gate, 0, 0, false, v_now)).rate_at;
  v_rate.rate_seconds := v_policy.rate_seconds;
  v_rate.rate_burst := v_policy.rate_burst;
  queue := p_queue;
  group_key := p_group_key;
  rate_limit := case when p_group_key is null then v_queue.rate_limit else coalesce(v_group.rate_limit, v_queue.group_rate_limit) end;
  rate_period := case when p_group_key is null then v_queue.rate_period else coalesce(v_group.rate_period, v_queue.group_rate_period) end;
  rate_burst := v_policy.rate_burst;
  -- What else keeps the group waiting is not asked here.
  select a.tasks, a.look_at into available, next_at from fairq._allowance(v_rate, v_gate, v_now) a;
  used := rate_burst - available;
  full_at := case when v_gate.rate_at > v_now then v_gate.rate_at end;
  return next;
end;
$$;
comment on function fairq.rate_usage is 'How much of the rate of a group, or of a whole queue, is used, and when the next task may go.';

-- The lane that a rate is charged to: of a group, or, with p_group_key null, of the queue as a whole.
-- Raises QF001 group key, QF003 unknown queue.
create function fairq._rate_scope(p_queue text, p_group_key text, out shard_no integer, out queue text, out group_key text)
language plpgsql stable set search_path = '' as $$
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

-- sql/control/reset_rate.sql

-- Forgets what was used of a rate: of a group's, or, with p_group_key null, of the rate of the whole queue. A full burst may go at once. Tasks that run
-- already stay so, and are not charged again. Nothing happens where nothing was used.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the domain of the queue, or #meters, and waits for it; lanes, one row replaced.
create function fairq.reset_rate(p_queue text, p_group_key text default null) returns void
language plpgsql set search_path = '' as $$
declare
  v_scope record;
  v_lane fairq.lanes;
begin
  select s.shard_no, s.queue, s.group_key into v_scope from fairq._rate_scope(p_queue, p_group_key) s;
  -- The lane first hears all there is to hear; from here on nobody else writes it.
  if p_group_key is null then
    perform fairq._settle_meters(fairq._now());
  else
    perform fairq._promote(v_scope.shard_no, v_scope.queue, 1, true);
  end if;
  v_lane := fairq._lane(v_scope.shard_no, v_scope.queue, v_scope.group_key);
  if (v_lane.gate).rate_at is null then
    return;
  end if;

  v_lane.version := v_lane.version + 1;
  v_lane.gate.rate_at := null;
  insert into fairq.lanes select (v_lane).*;
  delete from fairq.lanes l
  where l.shard_no = v_lane.shard_no and l.queue = v_lane.queue and l.group_key = v_lane.group_key and l.version = v_lane.version - 1;
  -- What it has waiting may go: the next promotion looks at it, and workers that sleep until its next task was due are woken.
  if p_group_key is not null then
    perform fairq._ring_group(v_scope.shard_no, v_scope.queue, v_scope.group_key);
    perform fairq._promote(v_scope.shard_no, v_scope.queue, 1, true);
  end if;
  if p_group_key is null then
    perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
  end if;
end;
$$;
comment on function fairq.reset_rate is 'Forgets what was used of the rate of a group, or of a whole queue.';

-- sql/control/resume_group.sql

-- Serves a paused group again. It starts at the clock: what it missed is not made up for.
-- Raises QF001 group key, QF003 unknown queue.
-- Locks: groups, one row.
create function fairq.resume_group(p_queue text, p_group_key text) returns void
language plpgsql set search_path = '' as $$
declare
  v_shard_no integer;
begin
  perform fairq._check_group(p_queue, p_group_key);
  select fairq._shard_of(p_group_key, s.shard_count) into v_shard_no from fairq.settings s;
  update fairq.groups g
  set paused_at = null
  where g.shard_no = v_shard_no and g.queue = p_queue and g.group_key = p_group_key;
  perform fairq._ring_group(v_shard_no, p_queue, p_group_key);
end;
$$;
comment on function fairq.resume_group is 'Serves a paused group again.';

-- sql/control/resume_queue.sql

-- Serves a paused queue again; one that drains takes new tasks again.
-- Raises QF003 unknown queue.
-- Locks: queues, one row.
create function fairq.resume_queue(p_queue text) returns void
language plpgsql set search_path = '' as $$
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
comment on function fairq.resume_queue is 'Serves a paused queue again, and takes new tasks where it was draining.';

-- sql/control/settings.sql

-- What a configure_* function is to change, with nothing left to be found wrong. p_table is where the settings are columns, p_row the row as it is, p_known
-- the only ones that may be named (null: all of them). A null takes a setting away: the column's default stands for it. This is the one place that knows
-- ranges, for all scopes: no other way leads into these columns.
-- Returns the columns to write. A rate and its period, a breaker and its cooldown come and go together.
-- Raises QF014 an unknown setting, or a value of the wrong kind; QF007 a number, QF009 a time.
create function fairq._check_settings(p_of text, p_table regclass, p_row jsonb, p_settings jsonb, p_known text[] default null) returns jsonb
language plpgsql stable set search_path = '' as $$
declare
  v_changes jsonb := '{}'::jsonb;
  v_setting record;
  v_value jsonb;
  v_number double precision;
  v_fits boolean;
begin
  if jsonb_typeof(p_settings) <> 'object' then
    raise exception 'the settings of % are not an object but %', p_of, left(p_settings::text, 60)
      using errcode = 'QF014', hint = 'Names and values, for example: {"max_running": 5}.';
  end if;
  p_known := array(
    select a.attname::text
    from pg_catalog.pg_attribute a
    where a.attrelid = p_table
      and a.attnum > 0
      and not a.attisdropped
      and a.attname <> all(array['singleton', 'shard_no', 'queue', 'group_key', 'metered', 'internal', 'test_clock', 'paused_at', 'draining_at'])
      and (p_known is null or a.attname = any(p_known))
    order by a.attnum
  );

  for v_setting in
    select e.key as name, e.value, e.value #>> '{}' as input, format_type(a.atttypid, null) as type, pg_get_expr(d.adbin, d.adrelid) as preset,
      b.least, b.most
    from jsonb_each(p_settings) e
    left join pg_catalog.pg_attribute a on a.attrelid = p_table and a.attname = e.key and e.key = any(p_known)
    left join pg_catalog.pg_attrdef d on d.adrelid = a.attrelid and d.adnum = a.attnum
    left join (
      -- Times are in seconds.
      values
        ('weight', 0.001, 1000),
        ('max_running', 0, 2147483647),
        ('rate_limit', 1, 2147483647),
        -- A full burst at the slowest rate has to be paid for before the end of time, or promotion of the whole queue fails.
        ('rate_period', 0.000001, 366 * 86400),
        ('rate_burst', 1, 100000),
        ('breaker_threshold', 1, 2147483647),
        ('breaker_cooldown', 0.000001, 366 * 86400),
        ('ready_target', 1, 1000000),
        ('max_attempts', 1, 1000000),
        ('retry_base', 0, 366 * 86400),
        ('retry_cap', 0, 366 * 86400),
        ('retention', 0, 36525 * 86400::bigint),
        ('shard_count', 1, 4096),
        ('payload_limit', 1, 268435456)
    ) b(name, least, most) on b.name = regexp_replace(e.key, '^group_', '')
    order by e.key
  loop
    if v_setting.type is null then
      raise exception '% has no setting "%"', p_of, left(v_setting.name, 60)
        using errcode = 'QF014', hint = format('The nearest is %s. There are: %s.', fairq._nearest(v_setting.name, p_known), array_to_string(p_known, ', '));
    end if;
    if v_setting.input is null then
      execute 'select to_jsonb(' || coalesce(v_setting.preset, 'null::text') || ')' into v_value;
      v_changes := v_changes || jsonb_build_object(v_setting.name, v_value);
      continue;
    end if;

    v_value := v_setting.value;
    v_fits := jsonb_typeof(v_value) = case v_setting.type when 'boolean' then 'boolean' when 'text' then 'string' else 'number' end
      or v_setting.type = 'interval' and jsonb_typeof(v_value) = 'string';
    if v_fits then
      begin
        v_number := case v_setting.type
          when 'integer' then v_setting.input::integer
          when 'double precision' then v_setting.input::double precision
          when 'interval' then extract(epoch from v_setting.input::interval)
        end;
        v_fits := coalesce(v_number between v_setting.least and v_setting.most, v_setting.name <> 'fairness' or v_setting.input in ('count', 'time'))
          and (v_setting.type <> 'interval' or fairq._is_span(v_setting.input::interval, make_interval(secs => v_setting.most)));
      exception when data_exception then
        v_fits := false;
      end;
    end if;
    if not v_fits then
      raise exception 'setting % of % cannot be %', v_setting.name, p_of, left(v_value::text, 60)
        using errcode = case v_setting.type when 'interval' then 'QF009' when 'integer' then 'QF007' when 'double precision' then 'QF007' else 'QF014' end,
          hint = case v_setting.type
            when 'integer' then format('A whole number, %s to %s; null takes the setting away.', v_setting.least, v_setting.most)
            when 'double precision' then format('A number, %s to %s; null takes the setting away.', v_setting.least, v_setting.most)
            when 'interval' then format('A text such as "5 minutes", or a number of seconds: %s, at most %s days; null takes the setting away.',
              case v_setting.least when 0 then 'zero or more' else 'more than zero' end, trunc(v_setting.most / 86400))
            when 'boolean' then 'true or false; null takes the setting away.'
            else 'count (as many tasks for each) or time (as many worker seconds); null takes the setting away.'
          end;
    end if;
    if v_setting.type = 'interval' then
      -- A hundred thousand years less as many in days are no time at all, but no date can take both: kept as days and seconds.
      v_value := to_jsonb(justify_hours(make_interval(secs => v_number)));
    end if;
    v_changes := v_changes || jsonb_build_object(v_setting.name, v_value);
  end loop;

  for v_setting in
    select g.of || c.rule as rule, g.of || c.time as time, g.of || c.extra as extra, c.preset
    from (values (''), ('group_')) g(of)
    cross join (values ('rate_limit', 'rate_period', 'rate_burst', '1 second'), ('breaker_threshold', 'breaker_cooldown', null, '1 minute'))
      c(rule, time, extra, preset)
  loop
    if (p_row || v_changes) ->> v_setting.rule is not null then
      if (p_row || v_changes) ->> v_setting.time is null then
        v_changes := v_changes || jsonb_build_object(v_setting.time, v_setting.preset);
      end if;
      continue;
    end if;
    if v_changes ->> v_setting.time is not null then
      raise exception 'setting % of % says nothing without %', v_setting.time, p_of, v_setting.rule
        using errcode = 'QF007', hint = format('Set %s with it.', v_setting.rule);
    end if;
    if v_changes ? v_setting.rule then
      v_changes := jsonb_build_object(v_setting.time, null, coalesce(v_setting.extra, v_setting.time), null) || v_changes;
    end if;
  end loop;
  return v_changes;
end;
$$;

-- By the pairs of letters that two names share, of all they have.
create function fairq._nearest(p_name text, p_known text[]) returns text
language sql immutable set search_path = '' as $$
  select k.name
  from unnest(p_known) with ordinality k(name, nth)
  order by (select count(*) from generate_series(1, length(k.name) - 1) i where strpos(p_name, substr(k.name, i, 2)) > 0)
    / (length(k.name) + length(p_name))::double precision desc, k.nth
  limit 1
$$;

-- "weight = ($1).weight, ...": so that a statement that writes settings need not name them.
create function fairq._assignments(p_changes jsonb) returns text
language sql immutable set search_path = ''
as $$ select string_agg(format('%1$I = ($1).%1$I', c.name), ', ') from jsonb_object_keys(p_changes) c(name) $$;

-- Writes the settings of a group, or of a concurrency key (queue #keys). Its lane is rung and looks its policy up again.
-- Returns the settings in force.
-- Raises QF007, QF009, QF014 (see _check_settings).
-- Locks: groups, one row.
create function fairq._set_limits(p_shard_no integer, p_queue text, p_group_key text, p_of text, p_settings jsonb, p_known text[] default null)
returns fairq.groups
language plpgsql set search_path = '' as $$
declare
  v_group fairq.groups;
  v_changes jsonb;
begin
  insert into fairq.groups (shard_no, queue, group_key) values (p_shard_no, p_queue, p_group_key) on conflict do nothing;
  select g.* into v_group
  from fairq.groups g
  where g.shard_no = p_shard_no and g.queue = p_queue and g.group_key = p_group_key
  for update;

  v_changes := fairq._check_settings(p_of, 'fairq.groups', to_jsonb(v_group), p_settings, p_known);
  if v_changes <> '{}' then
    v_group := jsonb_populate_record(v_group, v_changes);
    execute 'update fairq.groups g set ' || fairq._assignments(v_changes) || ' where g.shard_no = $2 and g.queue = $3 and g.group_key = $4'
    using v_group, p_shard_no, p_queue, p_group_key;
  end if;
  perform fairq._ring_group(p_shard_no, p_queue, p_group_key);
  return v_group;
end;
$$;

-- The limits of a whole queue ('queue NAME'), or of the cluster, have changed. A first cap or breaker counts the tasks that are held already; those being
-- popped at this very moment escape it. The caller holds #meters and has let it hear all there was to hear under the old limits.
-- Locks: held tasks with "skip locked"; queues whose pops have to ask the meters from now on, or no longer.
create function fairq._apply_meter(p_scope text, p_queue text) returns void
language plpgsql set search_path = '' as $$
declare
  v_counts boolean := fairq._counts(fairq._meter_policy(p_scope));
  v_bit integer := case when p_scope = 'cluster' then 2 else 1 end;
  v_adopted integer;
begin
  perform fairq._ring_group(0, '#meters', p_scope);
  with held as materialized (
    select k.id, k.shard_no
    from fairq._shards(null) s(shard_no)
    join fairq.held k on k.shard_no = s.shard_no
    join fairq.tasks t on t.shard_no = k.shard_no and t.id = k.id
    where (p_queue is null or t.queue = p_queue)
      and (k.meters & v_bit <> 0) <> v_counts
    for update of k skip locked
  ),
  changed as (
    update fairq.held k
    set meters = case when v_counts then k.meters | v_bit else k.meters & ~v_bit end
    from held h
    where k.shard_no = h.shard_no and k.id = h.id
    returning k.id
  )
  select count(*)::integer into v_adopted from changed;
  if v_adopted > 0 then
    insert into fairq.rings (shard_no, queue, group_key, freed)
    values (0, '#meters', p_scope, case when v_counts then -v_adopted else v_adopted end);
  end if;
  perform fairq._settle_meters(fairq._now());
  perform fairq._set_metered();
end;
$$;

-- Notes with each queue whether its pops have to ask the meters.
create function fairq._set_metered() returns void
language plpgsql set search_path = '' as $$
begin
  update fairq.queues q
  set metered = not q.metered
  where not q.internal
    and q.metered <> (fairq._meter_policy('queue ' || q.queue) is distinct from null or fairq._meter_policy('cluster') is distinct from null);
end;
$$;

-- A row of settings as an object, lengths of time in seconds: what is answered can be set again. For drivers, which agree on no more than that.
create function fairq._settings_json(p_row anyelement) returns jsonb
language sql stable set search_path = '' as $$
  select jsonb_object_agg(e.key, case when a.atttypid = 'interval'::regtype then to_jsonb(extract(epoch from (e.value #>> '{}')::interval)) else e.value end)
  from jsonb_each(to_jsonb(p_row)) e
  join pg_catalog.pg_type t on t.oid = pg_typeof(p_row)
  join pg_catalog.pg_attribute a on a.attrelid = t.typrelid and a.attname = e.key
$$;

-- sql/control/watch_task.sql

-- Asks for a notice on the channel fairq_done when a task ends, in whatever way. LISTEN first, then call this, then look whether the task is
-- live still: between a look and a watch it might end unheard. Whoever waits for longer than p_for calls it again in time.
-- It holds from the commit of this transaction on; call it in one of its own, and wait outside of any.
-- Returns true when the task was live.
-- Raises QF009 a time that is not positive, or longer than an hour.
-- Locks: none; one insert.
create function fairq.watch_task(p_id bigint, p_for interval default '1 minute') returns boolean
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
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
comment on function fairq.watch_task is 'Asks for a notice on the channel fairq_done when a task ends. False: it is not live.';

-- sql/upkeep/expiry.sql

-- Ends waiting tasks of a shard whose deadline passed, at most p_limit. Promotion and pop would refuse them too, when their turn comes; this
-- tells their owners in time.
-- Each deadline is looked at once: the sweep starts where the last one ended, not at the dead entries of tasks long finished. A task
-- whose transaction committed after its own deadline is missed here and meets promotion.
-- Held tasks are left to their holders.
-- Locks: the domains of the tasks it ends, without waiting (a busy one is left for the next sweep); ready and parked rows with "skip locked".
-- enable_sort is off: the rows come in the order of the index, another one with a sort behind it would read all of them.
-- Cost: tasks_expiry_idx from the floor to now.
create function fairq._expire_waiting(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = '' set enable_sort = off as $$
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
      and t.expires_at >= coalesce(v_floor, '-infinity')
      and t.expires_at <= p_now
    order by t.expires_at
    limit p_limit + 1
  ) e;

  for v_queue in
    select distinct t.queue
    from fairq.tasks t
    where t.shard_no = p_shard_no
      and t.expires_at >= coalesce(v_floor, '-infinity')
      and t.expires_at <= v_until
    order by t.queue
  loop
    if fairq._lock_domain(p_shard_no, v_queue, false) then
      v_ended := v_ended + fairq._end_tasks(p_shard_no, array(
        select t.id
        from fairq.tasks t
        where t.shard_no = p_shard_no and t.queue = v_queue
              and t.expires_at >= coalesce(v_floor, '-infinity')
          and t.expires_at <= v_until
        order by t.expires_at
        limit p_limit - v_ended
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

-- sql/upkeep/maintain.sql

-- Keeps the house: takes tasks from lost workers, gives up claims whose lease ran out, ends what expired, promotes what is due, sweeps, turns the
-- history's pages. Safe to call from anywhere and as often as one likes: one runs at a time per shard, the others return at once.
-- In parts, each able to fail alone: what fails is rolled back, and noted in fairq.upkeep_failures until it succeeds; the others go on. Whoever can,
-- calls them one by one, each in a transaction of its own (p_part, see upkeep_parts), so that no part holds what another has locked.
-- Returns what it did, by name; an empty object when another one was at it.
-- Raises QF005 outside READ COMMITTED, QF014 unknown part.
-- Locks: maintenance, one row per shard; then as the parts say. Bounded by p_limit rows of a kind, so a call is short; call it every few seconds.
create function fairq.maintain(p_limit integer default 10000, p_part text default null) returns jsonb
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
  v_part text;
  v_did jsonb;
  v_done jsonb := jsonb_build_object();
begin
  perform fairq._check_limit(p_limit);
  perform fairq._check_isolation('upkeep');
  if p_part is not null and not exists (select from fairq.upkeep_parts() u(part) where u.part = p_part) then
    raise exception 'upkeep has no part "%"', p_part using errcode = 'QF014', hint = 'See: select fairq.upkeep_parts();';
  end if;
  for v_shard_no in
    select m.shard_no from fairq.maintenance m order by m.shard_no for update skip locked
  loop
    for v_part in select u.part from fairq.upkeep_parts() u(part) where p_part is null or u.part = p_part loop
      begin
        v_did := fairq._upkeep(v_shard_no, v_part, p_limit);
        delete from fairq.upkeep_failures f where f.shard_no = v_shard_no and f.part = v_part;
        select coalesce(jsonb_object_agg(k.name, coalesce((v_done ->> k.name)::bigint, 0) + coalesce((v_did ->> k.name)::bigint, 0)), v_done) into v_done
        from (select jsonb_object_keys(v_done) union select d.key from jsonb_each_text(v_did) d where d.value::bigint > 0) k(name);
      exception when others then
        insert into fairq.upkeep_failures as f (shard_no, part, failed_since, failed_at, message)
        values (v_shard_no, v_part, fairq._wall(), fairq._wall(), format('%s (%s)', sqlerrm, sqlstate))
        on conflict (shard_no, part) do update
        set failed_at = excluded.failed_at, message = excluded.message;
        v_done := v_done || jsonb_build_object('failed', coalesce((v_done ->> 'failed')::bigint, 0) + 1);
      end;
    end loop;
  end loop;
  return v_done;
end;
$$;
comment on function fairq.maintain is
  'Lost workers, expired claims and tasks, due schedules, sweeps, partitions. Call it every few seconds from anywhere.';

-- The parts of upkeep, in the order in which they matter.
create function fairq.upkeep_parts() returns setof text
language sql stable set search_path = '' as $$
  select 'recovery'
  union all
  select 'expiry'
  union all
  (select 'queue ' || q.queue from fairq.queues q order by q.queue)
  union all
  select 'notes'
  union all
  select 'partitions'
$$;
comment on function fairq.upkeep_parts is 'The parts of fairq.maintain(), in order.';

-- One part of upkeep in one shard. Returns what it did, by name.
create function fairq._upkeep(p_shard_no integer, p_part text, p_limit integer) returns jsonb
language plpgsql set search_path = '' as $$
declare
  v_now timestamptz := fairq._wall();
  v_queue fairq.queues;
begin
  case
    when p_part = 'recovery' then
      return jsonb_build_object('recovered', (
          select sum(fairq._recover_worker(p_shard_no, s.worker_id, p_limit, v_now)) from fairq._silent_workers(p_shard_no, v_now) s(worker_id)),
        'unclaimed', fairq._give_up_claims(p_shard_no, p_limit, v_now));
    when p_part = 'expiry' then
      return jsonb_build_object('expired', fairq._expire_waiting(p_shard_no, p_limit, v_now));
    when p_part = 'notes' then
      return jsonb_build_object('swept', fairq._sweep_notes(p_shard_no, p_limit, v_now));
    when p_part = 'partitions' then
      return jsonb_build_object('partitions', case when p_shard_no = 0 then fairq._rotate_partitions() end);
    else
      select q.* into v_queue from fairq.queues q where 'queue ' || q.queue = p_part;
      return fairq._keep_queue(p_shard_no, v_queue, p_limit);
  end case;
end;
$$;

-- Promotes a queue that has news, and sweeps what promotion left behind.
create function fairq._keep_queue(p_shard_no integer, p_queue fairq.queues, p_limit integer) returns jsonb
language plpgsql set search_path = '' as $$
declare
  v_promoted integer;
  v_swept integer;
begin
  if p_queue.internal then
    if fairq._lock_domain(p_shard_no, p_queue.queue, false) and p_queue.queue = '#keys' then
      perform fairq._open_keys(p_shard_no, fairq._now());
    elsif p_queue.queue = '#meters' and p_shard_no = 0 and fairq._lock_domain(0, '#meters', false) then
      perform fairq._settle_meters(fairq._now());
    end if;
  elsif not exists (select from fairq._tick(p_shard_no, p_queue.queue) k where not fairq._has_news(k)) then
    v_promoted := (fairq._promote(p_shard_no, p_queue.queue, fairq._ready_target(p_shard_no, p_queue), false)).o_promoted;
    if v_promoted > 0 and p_queue.notify then
      perform pg_notify('fairq', p_queue.queue);
    end if;
  end if;
  if fairq._lock_domain(p_shard_no, p_queue.queue, false) then
    -- Nobody promotes a paused queue, which keeps a key that was given to one of its tasks.
    if p_queue.paused_at is not null and fairq._lock_domain(p_shard_no, '#keys', false) then
      perform fairq._take_keys_back(p_shard_no, p_queue.queue, fairq._now());
    end if;
    v_swept := fairq._sweep_domain(p_shard_no, p_queue.queue, p_limit);
  end if;
  return jsonb_build_object('promoted', coalesce(v_promoted, 0), 'swept', coalesce(v_swept, 0));
end;
$$;

-- sql/upkeep/partitions.sql

-- Makes the day partitions of the history up to a week ahead, and drops those past every queue's retention.
-- SECURITY DEFINER, the only one: whoever may run fairq.maintain() need not own the tables. It takes no argument, so there is nothing to
-- inject: the names of the partitions are computed from dates.
-- A day that the default partition already has rows of gets none. At the first lock that is not free it gives up until the next time: everybody who
-- ends a task would queue behind it.
-- Returns how many partitions it made and dropped.
-- Locks: ACCESS EXCLUSIVE on the partition dropped and on the history table, for a moment, waited for 5 ms at most. No domain: it runs on its own.
create function fairq._rotate_partitions() returns integer
language plpgsql security definer set search_path = '' set lock_timeout = '5ms' set timezone = 'UTC' as $$
declare
  v_today date := (fairq._wall() at time zone 'UTC')::date;
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
      exception
        when lock_not_available then
          return v_changed;
        when duplicate_table or check_violation then
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
        return v_changed;
      end;
    end loop;
  end loop;
  return v_changed;
end;
$$;

-- sql/upkeep/rebuild.sql

-- Makes anew what promotion knows of a queue, from its bodies and holders. For when a queue seems wrong: nothing is lost by it, and nothing runs twice; groups
-- start at the clock again. A call is short however many tasks there are: they are announced again in portions, with the passes that follow.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED.
-- Locks: the domains of the queue and of the keys, waits for them; ready tasks that are being popped.
create function fairq.rebuild(p_queue text) returns void
language plpgsql set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off
as $$
declare
  v_shard_no integer;
begin
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;
  for v_shard_no in select s.shard_no from fairq._shards(null) s(shard_no) loop
    perform fairq._lock_domain(v_shard_no, p_queue, true);
    perform fairq._start_anew(v_shard_no, p_queue);
    perform fairq._count_anew(v_shard_no, '#keys');
  end loop;
  perform fairq._lock_domain(0, '#meters', true);
  perform fairq._count_anew(0, '#meters');
  perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = p_queue and q.notify;
end;
$$;
comment on function fairq.rebuild is 'Makes anew what promotion knows of a queue, from its tasks and holders.';

-- sql/upkeep/recovery.sql

-- Gives a worker up that gave no sign of life for its lease, and puts its tasks back in line, at most p_limit of them. A running task has used its attempt up:
-- the loss is noted in fairq.attempts, and without attempts left the task ends as failed. A claimed one that never started has not.
-- From now on every call of the worker is refused, so that it learns of it with the very next one. Its row goes once nothing of it is left.
-- Returns how many tasks it took from the worker.
-- Locks: the worker's row, then held, both "skip locked": a worker that is popping right now is alive, and so is one that beat since we looked.
-- Cost: all held tasks of the shard.
create function fairq._recover_worker(p_shard_no integer, p_worker_id bigint, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = '' as $$
declare
  v_error jsonb := jsonb_build_object('code', 'worker_lost', 'message', format('worker %s gave no sign of life', p_worker_id));
  v_lost fairq.leaving[];
begin
  perform from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id for update skip locked;
  if not found or not exists (select from fairq._silent_workers(p_shard_no, p_now) s(worker_id) where s.worker_id = p_worker_id) then
    return 0;
  end if;
  update fairq.workers w set lost_at = p_now where w.shard_no = p_shard_no and w.worker_id = p_worker_id and w.lost_at is null;
  v_lost := fairq._find_of_worker(p_shard_no, p_worker_id, null, 'worker_lost', v_error, p_limit);
  perform fairq._leave(p_shard_no, v_lost, p_now);
  if not exists (select from fairq.held h where h.shard_no = p_shard_no and h.worker_id = p_worker_id) then
    delete from fairq.heartbeats h where h.shard_no = p_shard_no and h.worker_id = p_worker_id;
    delete from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id;
  end if;
  return coalesce(cardinality(v_lost), 0);
end;
$$;

-- Workers without a sign of life for their lease. While the server was down nobody could give one.
create function fairq._silent_workers(p_shard_no integer, p_now timestamptz) returns setof bigint
language plpgsql set search_path = '' as $$
begin
  return query
    select w.worker_id
    from fairq.workers w
    where w.shard_no = p_shard_no
      and (w.lost_at is not null
        or p_now > w.lease + greatest(pg_postmaster_start_time(), w.registered_at, (
          select h.beat_at
          from fairq.heartbeats h
          where h.shard_no = p_shard_no and h.worker_id = w.worker_id
          order by h.beat_at desc
          limit 1
        )))
    order by w.worker_id;
end;
$$;

-- Claims whose lease ran out go back in line, at most p_limit; no attempt is burned, for none began. The sweep starts where the last one ended, not at
-- the dead entries of all claims ever made; it does not pass one that is locked, being started or finished right now.
-- A claim may commit long after its lease ended. So the sweep remembers a time with the transactions that ran then, and goes past it when they have ended.
-- Returns how many it gave up.
-- Locks: held, "skip locked".
-- Cost: held_claim_lease_idx from the floor to now.
create function fairq._give_up_claims(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = '' set enable_sort = off as $$
declare
  v_floor timestamptz := coalesce(to_timestamp(fairq._sweep_floor(p_shard_no, 'claims') / 1000000.0), '-infinity');
  v_next bigint := fairq._sweep_floor(p_shard_no, 'claims next');
  v_next_xid bigint := fairq._sweep_floor(p_shard_no, 'claims next xid');
  v_claims fairq.leaving[];
begin
  select array_agg((h.id, b.ctid, h.ctid, null, null, 'lease_expired', null, null, null, h.attempt, h.worker_id, null, h.charge, h.meters, h.counted,
    h.keyed)::fairq.leaving)
  into v_claims
  from (
    select k.ctid, k.id, k.attempt, k.worker_id, k.charge, k.meters, k.counted, k.keyed
    from fairq.held k
    where k.shard_no = p_shard_no and k.lease_expires_at >= v_floor and k.lease_expires_at <= p_now
    order by k.lease_expires_at
    limit p_limit
    for update skip locked
  ) h
  cross join lateral (select t.ctid from fairq.tasks t where t.shard_no = p_shard_no and t.id = h.id offset 0) b;
  perform fairq._leave(p_shard_no, v_claims, p_now);

  if v_next is null or (pg_snapshot_xmin(pg_current_snapshot())::text::bigint >= v_next_xid and not exists (
      select
      from fairq.held k
      where k.shard_no = p_shard_no and k.lease_expires_at >= v_floor
        and k.lease_expires_at <= p_now))
  then
    perform fairq._set_sweep_floor(p_shard_no, 'claims', v_next);
    perform fairq._set_sweep_floor(p_shard_no, 'claims next', (extract(epoch from p_now - interval '1 minute') * 1000000)::bigint);
    perform fairq._set_sweep_floor(p_shard_no, 'claims next xid', pg_snapshot_xmax(pg_current_snapshot())::text::bigint);
  end if;
  return coalesce(cardinality(v_claims), 0);
end;
$$;

-- sql/upkeep/sweeps.sql

-- Removes what promotion has left behind in a domain: rings every later tick would ignore, ticks but the last, lanes of groups that are idle and
-- whose turn is used up (they would start at the clock anyway). At most p_limit of each.
-- Returns how many rows it removed.
-- enable_sort is off: the rows come in the order of an index, and another index with a sort behind it would read all of them.
-- Locks: the rows it removes; the caller holds the domain.
create function fairq._sweep_domain(p_shard_no integer, p_queue text, p_limit integer) returns integer
language plpgsql set search_path = '' set enable_sort = off as $$
declare
  v_tick fairq.ticks;
  v_floor bigint;
  v_partly xid8;
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
  -- Not past a transaction of which only a part was heard: its rings may be many, and will be heard soon.
  select p.xid into v_partly from unnest(v_tick.pending) p where p.ring_id > 0 order by p.xid limit 1;
  with heard as materialized (
    select r.ctid, r.xid
    from fairq.rings r
    where r.shard_no = p_shard_no and r.queue = p_queue and r.xid >= v_floor::text::xid8
      and r.xid < least(v_tick.next_xid, v_partly)
      and r.xid <> v_tick.heard_xid
      and r.xid <> all(array(select p.xid from unnest(v_tick.pending) p))
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
    where k.shard_no = p_shard_no and k.queue = p_queue and k.tick >= v_floor and k.tick < v_tick.tick
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
    where l.shard_no = p_shard_no and l.queue = p_queue and not l.admissible
      -- A meter is asked without looking at the settings: its lane is never missing.
      and l.queue <> '#meters'
      and l.finish >= v_floor
      and l.finish <= v_tick.clock
      and (l.cursors = '{}' or l.version < v_tick.first_version)
      and (l.version < v_tick.first_version or l.gate is null or (l.gate).in_flight = 0 and (l.gate).open_until is null and coalesce((l.gate).failures, 0) = 0)
    order by l.finish
    limit p_limit
  )
  select count(*) filter (where i.is_paid)::integer as swept, array_agg(i.ctid) filter (where i.is_paid) as ctids,
    coalesce(min(i.finish) filter (where not i.is_paid), max(i.finish)) as last
  into v_lanes
  from idle i;
  perform fairq._remove(p_shard_no, 'lanes', v_lanes.ctids);
  perform fairq._set_sweep_floor(p_shard_no, 'lanes ' || p_queue, v_lanes.last);

  -- Lanes of before a rebuild lie behind the clock, whatever they say.
  with stale as materialized (
    select l.ctid
    from fairq.lanes l
    where l.shard_no = p_shard_no and l.queue = p_queue and l.admissible and l.finish >= v_floor and l.finish < v_tick.clock
      and l.version < v_tick.first_version
    order by l.finish
    limit p_limit
  )
  select v_lanes.swept + fairq._remove(p_shard_no, 'lanes', array(select s.ctid from stale s)) as swept into v_lanes;

  return v_rings.swept + v_late + v_ticks.swept + v_lanes.swept;
end;
$$;

-- Rings of transactions that were still open when the sweep of rings passed them: remembered here, by id, and removed when a tick has heard them.
-- Returns how many rings it removed.
create function fairq._sweep_late_rings(p_shard_no integer, p_queue text, p_tick fairq.ticks, p_passed bigint)
returns integer
language plpgsql set search_path = '' as $$
declare
  v_what text := 'late rings ' || p_queue;
  v_open bigint[] := array(
    select x.id
    from (
      select p.xid::text::bigint from unnest(p_tick.pending) p
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
    where w.shard_no = p_shard_no and w.what = v_what
      and w.floor < p_tick.next_xid::text::bigint
      and w.floor <> p_tick.heard_xid::text::bigint
      and w.floor::text::xid8 <> all(array(select p.xid from unnest(p_tick.pending) p))
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
      where k.shard_no = p_shard_no and k.queue = p_queue and k.xid = d.xid::text::xid8
      offset 0
    ) r
  ));
end;
$$;

-- Removes wishes to cancel and progress whose task is gone, watches that ran out, idempotency keys whose task is gone for longer than the retention, and rows of the
-- history's default partitions past every queue's. At most p_limit of each.
-- Returns how many rows it removed.
create function fairq._sweep_notes(p_shard_no integer, p_limit integer, p_now timestamptz) returns integer
language plpgsql set search_path = '' as $$
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
    where n.shard_no = p_shard_no and n.until < p_now
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

-- Where the next sweep of a kind starts; null: at the beginning.
create function fairq._sweep_floor(p_shard_no integer, p_what text) returns bigint
language sql stable as $$
  select max(w.floor) from fairq.sweeps w where w.shard_no = p_shard_no and w.what = p_what
$$;

-- Remembers how far a sweep has come.
create function fairq._set_sweep_floor(p_shard_no integer, p_what text, p_floor bigint) returns void
language plpgsql set search_path = '' as $$
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

-- sql/views/explain_task.sql

-- Why a task is not running, and what stands before it: one row, also for a task that ended; none for an unknown id.
-- ahead counts the tasks served before it as things stand: for a queued task those queued before it, for one in overflow those of its own
-- group plus, for each other group, the rounds until then are not guessed: ahead_in_group is exact, ahead is null.
create function fairq.explain_task(p_id bigint)
returns table (
  task_id bigint, state text, reason text, ahead_in_group bigint, ahead bigint, next_look_at timestamptz, worker_id bigint, attempt integer,
  max_attempts integer
)
language plpgsql rows 1 set search_path = '' set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off
set enable_bitmapscan = off as $$
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
    from fairq.live_tasks k
    where k.shard_no = s.shard_no and k.id = p_id
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
  where w.shard_no = v_task.shard_no and v_task.queue = any(w.queues);

  if v_task.state in ('overflow', 'queued') then
    select count(*) into ahead_in_group
    from fairq.live_tasks t
    where t.shard_no = v_task.shard_no and t.queue = v_task.queue and t.group_key = v_task.group_key
      and t.state in ('overflow', 'queued')
      and (-t.priority, t.sequence) < (-v_task.priority, v_task.sequence);
  end if;
  if v_task.state = 'queued' then
    select count(*) into ahead
    from fairq.live_tasks t
    where t.shard_no = v_task.shard_no and t.queue = v_task.queue
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
comment on function fairq.explain_task is 'Why a task is not running, and what stands before it.';

-- What keeps a waiting task from being served now, beside its turn: a paused queue, the limits of its group, key, queue and of the cluster, in the order in
-- which it meets them. Reads the same lanes and the same _allowance as promotion and pop.
create function fairq._obstacles(
  p_shard_no integer, p_queue text, p_group_key text, p_concurrency_key text, p_state text, p_now timestamptz
) returns table (nth integer, reason text, look_at timestamptz)
language plpgsql stable rows 1 set search_path = '' as $$
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
        from fairq.live_tasks t
        where t.shard_no = p_shard_no and t.concurrency_key = p_concurrency_key and t.keyed
        limit 5
      ) h;
      reason := format('%s; held by task %s', reason, coalesce(v_holders, 'none'));
    end if;
    return next;
  end loop;
end;
$$;

-- sql/views/live_tasks.sql

-- What a live task is doing, put together from body, ready, held and parked. For people and dashboards, not for a tight loop.
create view fairq.live_tasks as
select t.shard_no, t.id, t.queue, t.group_key, t.kind, t.priority, t.sequence, t.cost, t.created_at, t.run_at, t.expires_at, t.timeout, t.max_attempts,
  t.idempotency_key, t.concurrency_key,
  case
    when h.id is not null then case when h.started_at is null then 'claimed' else 'running' end
    when r.id is not null then 'queued'
    when t.scheduled then 'scheduled'
    when k.id is not null then 'blocked'
    else 'overflow'
  end as state,
  coalesce(h.attempt, t.attempt) as attempt,
  h.worker_id, h.started_at, h.lease_expires_at, r.block, r.position,
  coalesce(h.counted, r.counted, false) as counted,
  coalesce(h.keyed, r.keyed, k.granted, false) as keyed,
  coalesce(h.meters, 0) as meters,
  coalesce(h.charge, r.charge) as charge
from fairq.tasks t
left join fairq.held h on h.shard_no = t.shard_no and h.id = t.id
left join fairq.ready r on r.shard_no = t.shard_no and r.id = t.id
left join fairq.parked k on k.shard_no = t.shard_no and k.id = t.id;
comment on view fairq.live_tasks is
  'Live tasks and what they are doing: scheduled, overflow (waiting, not yet in the order), blocked (its concurrency key is taken), queued (has an address), claimed, running.';

-- sql/views/stats.sql

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
left join fairq.live_tasks t on t.queue = q.queue
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
from fairq.live_tasks t
group by t.queue, t.group_key;
comment on view fairq.group_stats is 'Live tasks per queue, group and state. Counts all live tasks.';

create view fairq.worker_stats as
select w.worker_id, w.name, w.queues, w.slots, w.registered_at, w.lease,
  (select max(h.beat_at) from fairq.heartbeats h where h.shard_no = w.shard_no and h.worker_id = w.worker_id) as beat_at,
  (select count(*) from fairq.held t where t.worker_id = w.worker_id) as held
from fairq.workers w
where w.shard_no = 0
  and w.lost_at is null;
comment on view fairq.worker_stats is 'Workers, their last sign of life and how many tasks they hold.';

create view fairq.estimates as
select l.queue, l.group_key, e.kind, e.seconds, e.tasks
from fairq.lanes l
cross join lateral unnest((l.pace).estimates) as e(kind, tasks, seconds);
comment on view fairq.estimates is 'How long the tasks of a group and kind take, where groups share time: the mean of the last ones, and how many have been measured, up to 16.';

-- sql/first_rows.sql

-- What every installation begins with: one queue, the counters, and the history's first days.
insert into fairq.settings default values;
insert into fairq.queues (queue, internal, group_max_running) values ('default', false, null), ('#keys', true, 1), ('#meters', true, null);
select fairq._open_domain(0, q.queue) from fairq.queues q;
insert into fairq.maintenance (shard_no) values (0);
select fairq._rotate_partitions();

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
grant usage, select on all sequences in schema fairq to fairq_admin;

-- Producers: what they call, and what those functions touch.
grant execute on function fairq.create_task, fairq.create_tasks, fairq.cancel_task, fairq.watch_task, fairq._check_task, fairq._claim_idempotency_key,
  fairq._refuse_queue, fairq._refuse_draining, fairq._announced, fairq._shard_of, fairq._shards, fairq._now
to fairq_enqueue;
grant select on fairq.settings, fairq.queues, fairq.schema_version to fairq_enqueue, fairq_work, fairq_observe;
grant insert on fairq.tasks, fairq.rings, fairq.cancellations, fairq.watches to fairq_enqueue;
grant select (shard_no, id, queue, group_key) on fairq.tasks to fairq_enqueue;
grant select (shard_no, queue, tick, next_xid, heard_xid) on fairq.ticks to fairq_enqueue;
grant select (shard_no, queue, xid, announced) on fairq.rings to fairq_enqueue;
grant select (shard_no, id, outcome, finished_at, result, error) on fairq.finished_tasks to fairq_enqueue;
grant select, insert on fairq.idempotency_keys to fairq_enqueue;
grant select on fairq.progress to fairq_enqueue;
grant usage on sequence fairq.task_ids, fairq.ring_ids to fairq_enqueue, fairq_work;

-- Workers: all but the settings.
grant execute on all functions in schema fairq to fairq_work;
revoke execute on function fairq.configure_cluster, fairq.configure_queue, fairq.configure_group, fairq.configure_key, fairq.pause_queue,
  fairq.resume_queue, fairq.pause_group, fairq.resume_group, fairq.purge_group, fairq.drain_queue, fairq.reset_rate, fairq.rebuild
from fairq_work;
grant select, insert, update, delete on
  fairq.tasks, fairq.ready, fairq.held, fairq.parked, fairq.rings, fairq.lanes, fairq.ticks, fairq.workers, fairq.heartbeats, fairq.cancellations,
  fairq.watches, fairq.idempotency_keys, fairq.sweeps, fairq.progress, fairq.upkeep_failures,
  fairq.finished_tasks, fairq.finished_tasks_default, fairq.attempts, fairq.attempts_default
to fairq_work;
-- A row lock asks for the right to update; these rows are never updated.
grant select, update on fairq.domains, fairq.maintenance to fairq_work;
grant select on fairq.groups to fairq_work;
grant usage on sequence fairq.worker_ids to fairq_work;
grant select on sequence fairq.task_ids to fairq_work;

-- Dashboards: what is going on, and no payloads.
grant execute on function fairq.explain_task, fairq._shards, fairq._now, fairq._allowance, fairq._lane, fairq._obstacles, fairq.next_due_at, fairq._tick,
  fairq.rate_usage, fairq._rate_scope, fairq._check_group, fairq._refuse_queue, fairq._shard_of, fairq._policy, fairq._meter_policy, fairq._settle, fairq.upkeep_parts
to fairq_observe;
grant select on fairq.live_tasks, fairq.queue_stats, fairq.group_stats, fairq.worker_stats, fairq.estimates to fairq_observe, fairq_work;
grant select on fairq.ready, fairq.held, fairq.parked, fairq.lanes, fairq.ticks, fairq.workers, fairq.domains, fairq.heartbeats, fairq.attempts, fairq.groups,
  fairq.progress, fairq.upkeep_failures
to fairq_observe;
grant select (shard_no, id, sequence, queue, group_key, kind, scheduled, priority, created_at, run_at, expires_at, cost, attempt, max_attempts,
  concurrency_key) on fairq.tasks to fairq_observe;
grant select (shard_no, id, queue, group_key, kind, priority, outcome, worker_id, created_at, run_at, expires_at, started_at, finished_at,
  cost, attempt, max_attempts, concurrency_key) on fairq.finished_tasks to fairq_observe;

set local check_function_bodies = on;
