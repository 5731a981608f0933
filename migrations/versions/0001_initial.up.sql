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

create function fairq._step(p_cost double precision, p_weight double precision) returns bigint
language sql
immutable
parallel safe
as $$ select greatest(1, ceil(fairq._round() * p_cost / p_weight))::bigint $$;
comment on function fairq._step(double precision, double precision) is
  'How far a task moves its group in virtual time. At least one unit, so two tasks of a group never share an address.';

create function fairq._newcomer_position(p_sequence bigint) returns bigint
language sql
immutable
parallel safe
as $$ select p_sequence - 4611686018427387904 $$;
comment on function fairq._newcomer_position(bigint) is
  'Position of the first task of a group that was idle: before every lane number of the same block, first come first served among newcomers.';

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
--   2. domains              promotion, one at a time per (shard, queue); only this row lock is ever waited for by the engine
--   3. tasks                overflow, blocked and scheduled rows change only under the domain's lock;
--                           queued rows leave by pop or promotion, both "skip locked";
--                           claimed and running rows change by their holder, or by recovery with "skip locked"
--   4. lanes, ticks         written under the domain's lock only
-- Everything an application's transaction touches (tasks, rings, cancellations) it only inserts.
--
-- shard_no is the first column of every key and every index, and every hot statement names it: no call touches two shards.
-- settings and queues are the same everywhere (reference tables, should the shards ever live on several machines).

create sequence fairq.task_ids;
comment on sequence fairq.task_ids is 'Ids of tasks, and the order in which tasks of a group became runnable.';

create sequence fairq.worker_ids;
comment on sequence fairq.worker_ids is 'Ids of workers. Never reused, so a late message of a lost worker names nobody else.';

create table fairq.settings (
  singleton boolean primary key default true,
  shard_count integer not null default 1,
  payload_limit integer not null default 1048576,
  max_running integer,
  constraint settings_has_one_row check (singleton),
  constraint shard_count_in_range check (shard_count between 1 and 4096),
  constraint payload_limit_in_range check (payload_limit between 1 and 268435456),
  constraint max_running_not_negative check (max_running >= 0)
);
comment on table fairq.settings is 'Settings of the whole installation, one row. Change them with fairq.configure_cluster().';
comment on column fairq.settings.shard_count is 'Number of shards. Fixed once tasks exist.';
comment on column fairq.settings.payload_limit is 'Largest payload that create_task accepts, in bytes of its text form.';
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
  max_running integer,
  group_max_running integer,
  paused_at timestamptz,
  constraint queue_name_in_range check (octet_length(queue) between 1 and 200),
  constraint ready_target_positive check (ready_target >= 1),
  constraint max_attempts_positive check (max_attempts >= 1),
  constraint retry_base_not_negative check (retry_base >= interval '0'),
  constraint retry_cap_not_negative check (retry_cap >= interval '0'),
  constraint retention_not_negative check (retention >= interval '0'),
  constraint weight_in_range check (weight between 0.001 and 1000),
  constraint max_running_not_negative check (max_running >= 0),
  constraint group_max_running_not_negative check (group_max_running >= 0)
);
comment on table fairq.queues is 'Queues and their settings. Change them with fairq.configure_queue().';
comment on column fairq.queues.ready_target is 'How many tasks are kept queued, ready to be popped; null: four times the slots of the live workers, at least 1000.';
comment on column fairq.queues.max_attempts is 'Attempts of a task that names no number of its own.';
comment on column fairq.queues.retry_base is 'Back-off before the second attempt; doubled for every further one.';
comment on column fairq.queues.retry_cap is 'Longest back-off.';
comment on column fairq.queues.retention is 'How long ended tasks and attempts are kept.';
comment on column fairq.queues.notify is 'Whether new work is announced by NOTIFY. NOTIFY takes a database-wide lock at commit; polling works without.';
comment on column fairq.queues.weight is 'Weight of groups that have none of their own.';
comment on column fairq.queues.max_running is 'Most tasks in flight at once in this queue; null: no cap.';
comment on column fairq.queues.group_max_running is 'Most tasks in flight at once for each group that has no cap of its own; null: no cap.';
comment on column fairq.queues.paused_at is 'When the queue was paused; null: it is not.';

create table fairq.groups (
  shard_no integer not null,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  weight double precision,
  max_running integer,
  paused_at timestamptz,
  primary key (shard_no, queue, group_key),
  constraint weight_in_range check (weight between 0.001 and 1000),
  constraint max_running_not_negative check (max_running >= 0)
);
comment on table fairq.groups is 'Groups with settings of their own. Groups need no row here: unknown ones have the settings of their queue.';

create table fairq.domains (
  shard_no integer not null,
  queue text collate "C" not null,
  primary key (shard_no, queue)
);
comment on table fairq.domains is
  'One row per shard and queue, never updated: its row lock makes promotion one at a time. Unlike an advisory lock it is held on the node where the data is.';

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
  attempt integer not null default 0,
  max_attempts integer not null,
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
  constraint tasks_pkey primary key (shard_no, id),
  constraint state_is_known check (state in ('scheduled', 'overflow', 'blocked', 'queued', 'claimed', 'running')),
  constraint address_iff_queued check ((block is not null and position is not null) = (state in ('queued', 'claimed', 'running'))),
  constraint worker_iff_held check ((worker_id is not null) = (state in ('claimed', 'running'))),
  constraint cost_positive check (cost > 0 and cost < 'infinity'),
  constraint attempt_in_range check (attempt between 0 and max_attempts)
);
comment on table fairq.tasks is 'Live tasks. The truth: lanes, rings and ticks can be rebuilt from it.';
comment on column fairq.tasks.sequence is 'Order in which the tasks of a group became runnable.';
comment on column fairq.tasks.block is 'Block address: virtual start time, 2^20 units per round. Kept while the task is held, for explanation only.';
comment on column fairq.tasks.position is 'Order inside the block: the lane number, or a newcomer''s place before all lane numbers.';
comment on column fairq.tasks.run_at is 'Not before this time: as asked, or the end of the back-off.';
comment on column fairq.tasks.expires_at is 'Past this time the task is not started any more.';
comment on column fairq.tasks.lease_expires_at is 'End of the claim lease of a prefetched task.';
comment on column fairq.tasks.attempt is 'Attempts begun. Together with worker_id the fencing token of a holder.';
comment on column fairq.tasks.counted is 'The task holds one of its group''s places (the group had a cap when it was promoted).';
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
  error jsonb,
  constraint outcome_is_known check (outcome in ('succeeded', 'failed', 'cancelled', 'expired'))
) partition by range (finished_at);
comment on table fairq.finished_tasks is 'Ended tasks, partitioned by day; days beyond the retention are dropped by fairq.maintain().';
create table fairq.finished_tasks_default partition of fairq.finished_tasks default;
comment on table fairq.finished_tasks_default is 'Catches what has no day of its own yet.';

create table fairq.attempts (
  shard_no integer not null,
  task_id bigint not null,
  worker_id bigint,
  started_at timestamptz,
  ended_at timestamptz not null,
  attempt integer not null,
  outcome text collate "C" not null,
  error jsonb,
  constraint outcome_is_known check (outcome in ('retry', 'worker_lost', 'released', 'lease_expired'))
) partition by range (ended_at);
comment on table fairq.attempts is 'Attempts that did not end their task: append-only, partitioned by day.';
create table fairq.attempts_default partition of fairq.attempts default;
comment on table fairq.attempts_default is 'Catches what has no day of its own yet.';

create table fairq.rings (
  shard_no integer not null,
  freed integer not null default 0,
  xid xid8 not null default pg_current_xact_id(),
  sequence bigint,
  due_at timestamptz,
  cancelled_id bigint,
  priority integer,
  queue text collate "C" not null,
  group_key text collate "C" not null
);
comment on table fairq.rings is
  'Doorbells: "look at this group". Append-only; promotion consumes each exactly once, by transaction id, without touching it; fairq.maintain() sweeps them.';
comment on column fairq.rings.xid is 'The transaction that rings: visible to a promotion''s snapshot or still pending.';
comment on column fairq.rings.sequence is 'With priority: the first task announced; lowers the lane''s cursor.';
comment on column fairq.rings.due_at is 'A scheduled task was added: look again at this time.';
comment on column fairq.rings.freed is 'Places that came free in a group with a cap.';
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
  in_flight integer not null default 0,
  max_running integer,
  admissible boolean not null,
  queue text collate "C" not null,
  group_key text collate "C" not null,
  cursors fairq.cursor[] not null,
  constraint lanes_pkey primary key (shard_no, queue, group_key, version)
);
comment on table fairq.lanes is
  'A group''s state in the engine. Replaced (insert version n+1, delete version n), never updated: the newest version is one index step away however many dead ones lie behind it.';
comment on column fairq.lanes.lane_no is 'Number of the lane in its domain, in order of first appearance: its position in every block.';
comment on column fairq.lanes.finish is 'Finish tag: where in virtual time the group''s next task starts, at the earliest.';
comment on column fairq.lanes.position is 'Position of the group''s next task.';
comment on column fairq.lanes.in_flight is 'Counted tasks that are queued, claimed or running.';
comment on column fairq.lanes.admissible is 'Has overflow that may be promoted now.';
comment on column fairq.lanes.cursors is 'Where its overflow begins, per priority level, highest first; empty: it has none.';
comment on column fairq.lanes.last_priority is 'Priority of the task promoted last: a higher one that comes later overtakes it.';

create table fairq.ticks (
  shard_no integer not null,
  written_by xid not null default pg_current_xact_id()::xid,
  tick bigint not null,
  created_at timestamptz not null,
  clock bigint not null,
  top bigint not null,
  horizon bigint,
  horizon_position bigint,
  refill_block bigint,
  next_xid xid8 not null,
  next_due_at timestamptz,
  lane_count bigint not null,
  queue text collate "C" not null,
  pending xid8[] not null,
  constraint ticks_pkey primary key (shard_no, queue, tick),
  constraint horizon_is_whole check ((horizon is null) = (horizon_position is null))
);
comment on table fairq.ticks is 'What promotion has seen and decided, append-only, read newest first.';
comment on column fairq.ticks.written_by is
  'Transaction that wrote this row. After a dump is restored it differs from the row''s xmin: the horizon below means nothing then, and the engine rebuilds its state.';
comment on column fairq.ticks.clock is 'The block being served. Nothing is ever queued before it again: the lower bound of every scan of the ready index.';
comment on column fairq.ticks.top is 'Highest block ever assigned.';
comment on column fairq.ticks.horizon is 'Address of the first task not yet promoted; null: all are. Tasks beyond it are not popped, so no group is overtaken.';
comment on column fairq.ticks.refill_block is 'When pops get here the ready set is half empty.';
comment on column fairq.ticks.next_xid is 'Rings of this transaction and later ones are new.';
comment on column fairq.ticks.pending is 'Earlier transactions that were still running: their rings are new as well.';
comment on column fairq.ticks.next_due_at is 'When the next scheduled task becomes due.';
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

create table fairq.cancellations (
  shard_no integer not null,
  task_id bigint not null,
  requested_at timestamptz not null
);
comment on table fairq.cancellations is 'Wishes to cancel, append-only: promotion ends waiting tasks, holders learn of theirs with the heartbeat.';

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

create table fairq.sweeps (
  shard_no integer not null,
  floor bigint not null,
  what text collate "C" not null,
  primary key (shard_no, what, floor)
);
comment on table fairq.sweeps is
  'How far fairq.maintain() has come, per kind of sweep: the next one starts there, not at the dead rows of the past. Replaced, never updated.';

create table fairq.maintenance (
  shard_no integer primary key
);
comment on table fairq.maintenance is 'One row per shard, never updated: its row lock lets one fairq.maintain() run at a time.';

insert into fairq.settings default values;
insert into fairq.queues (queue) values ('default');
insert into fairq.domains (shard_no, queue) values (0, 'default');
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

-- promotion: new rings, by transaction.
create index rings_xid_idx on fairq.rings (shard_no, queue, xid);

-- promotion: lanes with admissible overflow in order of their next task; maintain: idle lanes behind the clock.
create index lanes_order_idx on fairq.lanes (shard_no, queue, admissible, finish, position);

-- result, explain_task, retry_task: an ended task by id.
create index finished_tasks_id_idx on fairq.finished_tasks (shard_no, id);

-- explain_task: the attempts of a task.
create index attempts_task_idx on fairq.attempts (shard_no, task_id);

-- heartbeat: is this task to be cancelled?
create index cancellations_task_idx on fairq.cancellations (shard_no, task_id);

-- sql/functions/_admit.sql

-- Gives addresses to waiting tasks: overflow -> queued.
--
-- Candidates are the lanes just rung (p_lanes, not stored) and, when the ready set is short (p_refill), the waiting lanes from the last
-- tick's horizon on. They are filled like connected vessels: the level is the virtual time up to which all of them together have
-- p_budget tasks; a lane below it gets as many as fit, at least one. The prefix sums below give that level without a loop: for lanes in order of
-- their tags, (budget + sum(weight * tag)) / sum(weight) is smallest at the prefix that the water covers.
--
-- A lane may get fewer tasks than others already have, and then the new horizon is its next task: pops stop there until the next
-- refill. So the served order is exact whatever the level was; the level only decides how much work a pass does.
--
-- One pass, lanes -> lateral tasks -> update, and the new lane versions from the same rows: a join between these CTEs would be a
-- nested loop, because the planner expects one row of each.
--
-- p_lanes are all written again. Expired tasks get no address; their ids are returned for the caller to end.
-- Locks: tasks (overflow rows, which only the holder of the domain changes), lanes; the caller holds the domain.
-- Cost: O(p_budget) lanes and tasks; lanes_order_idx from the horizon, tasks_overflow_idx from each lane's cursor, tasks by ctid.
create function fairq._admit(
  p_tick fairq.ticks,
  p_lanes fairq.lanes[],
  p_clock bigint,
  p_refill boolean,
  p_budget integer,
  p_now timestamptz,
  out o_promoted integer,
  out o_top bigint,
  out o_middle bigint,
  out o_horizon bigint,
  out o_horizon_position bigint,
  out o_expired bigint[]
)
language plpgsql
volatile
set search_path = ''
as $$
begin
  with waiting as materialized (
    select l.ctid as replaces, l.*
    from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.queue = p_tick.queue
      and l.admissible
      and (l.finish, l.position) >= (p_tick.horizon, p_tick.horizon_position)
    order by l.finish, l.position
    limit case when p_refill then p_budget + 1 else 1 end
  ),
  candidate as materialized (
    select null::tid as replaces, r.* from unnest(p_lanes) r
    union all
    select w.* from waiting w
  ),
  prefix as (
    select (p_budget + sum(c.weight * c.tag) over by_tag) / sum(c.weight) over by_tag as level
    from (
      select k.weight, k.finish, k.position, (k.finish - p_clock)::double precision / fairq._round() as tag
      from candidate k
      where k.admissible
        and (p_refill or k.replaces is null)
    ) c
    window by_tag as (order by c.finish, c.position)
  ),
  water as materialized (
    select case
        when p_refill then min(x.level)
        else least(min(x.level), (p_tick.horizon - p_clock)::double precision / fairq._round())
      end as level
    from prefix x
  ),
  share as materialized (
    select c.*,
      case
        when not c.admissible then 0
        when p_refill and (c.finish - p_clock)::double precision / fairq._round() >= w.level then 0
        when not p_refill and p_tick.horizon is not null
          and (c.finish, c.position) >= (p_tick.horizon, p_tick.horizon_position) then 0
        else least(
          fairq._allowance(c.max_running, c.in_flight),
          p_budget,
          greatest(1, ceil((w.level - (c.finish - p_clock)::double precision / fairq._round()) * c.weight))
        )::integer
      end as quota
    from candidate c
    cross join water w
  ),
  chunk as materialized (
    select s.*, k.ctids, k.starts, coalesce(k.served, 0)::bigint as served, coalesce(k.taken, 0)::integer as taken,
      k.lowest_priority, k.expired, k.next
    from share s
    left join lateral (
      select
        array_agg(n.ctid order by n.rank) filter (where n.rank <= s.quota and not n.is_expired) as ctids,
        array_agg(n.start order by n.rank) filter (where n.rank <= s.quota and not n.is_expired) as starts,
        sum(n.step) filter (where n.rank <= s.quota) as served,
        count(*) filter (where n.rank <= s.quota and not n.is_expired) as taken,
        min(n.priority) filter (where n.rank <= s.quota and not n.is_expired) as lowest_priority,
        array_agg(n.id) filter (where n.rank <= s.quota and n.is_expired) as expired,
        (array_agg((n.priority, n.sequence)::fairq.cursor) filter (where n.rank > s.quota))[1] as next
      from (
        select t.ctid, t.id, t.priority, t.sequence, t.is_expired, t.step,
          row_number() over line as rank,
          coalesce(sum(t.step) over (line rows between unbounded preceding and 1 preceding), 0)::bigint as start
        from unnest(s.cursors) c
        cross join lateral (
          select o.ctid, o.id, o.priority, o.sequence, o.expires_at is not null and o.expires_at <= p_now as is_expired,
            case
              when o.expires_at is not null and o.expires_at <= p_now then 0
              else fairq._step(o.cost, s.weight)
            end as step
          from fairq.tasks o
          where o.shard_no = p_tick.shard_no
            and o.queue = p_tick.queue
            and o.group_key = s.group_key
            and o.state = 'overflow'
            and o.priority = c.priority
            and o.sequence >= c.sequence
          order by o.sequence
          limit s.quota + 1
        ) t
        window line as (order by t.priority desc, t.sequence)
        limit s.quota + 1
      ) n
    ) k on s.quota > 0
  ),
  moved as (
    update fairq.tasks t
    set state = 'queued', block = m.block, position = m.position, counted = m.counted
    from (
      select u.ctid, c.finish + u.start as block, c.max_running is not null as counted,
        case when u.start = 0 then c.position else c.lane_no end as position
      from chunk c
      cross join lateral unnest(c.ctids, c.starts) as u(ctid, start)
    ) m
    where t.shard_no = p_tick.shard_no
      and t.ctid = m.ctid
    returning t.block
  ),
  replaced as (
    delete from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.ctid = any(array(select c.replaces from chunk c where c.replaces is not null and c.quota > 0))
  ),
  written as (
    insert into fairq.lanes (shard_no, queue, group_key, version, lane_no, finish, position, weight, max_running, in_flight,
      last_priority, cursors, admissible)
    select c.shard_no, c.queue, c.group_key, c.version + 1, c.lane_no, c.finish + c.served,
      case when c.taken > 0 then c.lane_no else c.position end,
      c.weight, c.max_running,
      c.in_flight + case when c.max_running is null then 0 else c.taken end,
      coalesce(c.lowest_priority, c.last_priority),
      case when c.quota > 0 then fairq._advance_cursors(c.cursors, c.next) else c.cursors end,
      case
        when c.quota > 0
          then (c.next).sequence is not null and fairq._allowance(c.max_running, c.in_flight + c.taken) > 0
        else c.admissible
      end
    from chunk c
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
  ),
  promoted as (
    select count(*)::integer as tasks, max(m.block) as top, percentile_disc(0.5) within group (order by m.block) as middle
    from moved m
  )
  select p.tasks, greatest(p_tick.top, p.top), p.middle,
    (select h.finish from horizon h), (select h.position from horizon h),
    (select array_agg(e.id) from chunk c cross join lateral unnest(c.expired) e(id))
  into o_promoted, o_top, o_middle, o_horizon, o_horizon_position, o_expired
  from promoted p;
end;
$$;
comment on function fairq._admit(fairq.ticks, fairq.lanes[], bigint, boolean, integer, timestamptz) is
  'Gives block addresses to the next tasks of the waiting lanes.';

-- sql/functions/_advance_cursors.sql

-- Cursors of a lane after its tasks up to p_next were promoted: higher priorities are used up, lower ones untouched.
create function fairq._advance_cursors(p_cursors fairq.cursor[], p_next fairq.cursor) returns fairq.cursor[]
language sql
immutable
as $$
  select case
    when (p_next).sequence is null then '{}'::fairq.cursor[]
    when cardinality(p_cursors) = 1 then array[p_next]
    else array[p_next] || array(
      select u
      from unnest(p_cursors) u
      where u.priority < (p_next).priority
      order by u.priority desc
    )
  end
$$;
comment on function fairq._advance_cursors(fairq.cursor[], fairq.cursor) is 'Moves the cursors of a lane to its first task not promoted.';

-- sql/functions/_allowance.sql

-- The one place that says how many tasks a group may have promoted now.
create function fairq._allowance(p_max_running integer, p_in_flight integer) returns integer
language sql
immutable
parallel safe
as $$
  select case
    when p_max_running is null then 2147483647
    else greatest(0, p_max_running - p_in_flight)
  end
$$;
comment on function fairq._allowance(integer, integer) is 'How many more tasks of a group may be promoted now.';

-- sql/functions/_has_news.sql

-- Whether a promotion would find something: a ring it has not heard, or a scheduled task that is due. Takes no lock, writes nothing.
-- A pending transaction is looked up only once it has ended, so one that holds a million rings and stays open costs nothing.
-- Cost: one entry of rings_xid_idx, one more per pending transaction that ended.
create function fairq._has_news(p_tick fairq.ticks) returns boolean
language sql
volatile
set search_path = ''
as $$
  select p_tick.next_due_at <= fairq._now()
    or exists (
      select
      from fairq.rings r
      where r.shard_no = p_tick.shard_no
        and r.queue = p_tick.queue
        and r.xid >= p_tick.next_xid
    )
    or exists (
      select
      from unnest(p_tick.pending) p(xid)
      where pg_visible_in_snapshot(p.xid, pg_current_snapshot())
        and exists (
          select
          from fairq.rings r
          where r.shard_no = p_tick.shard_no
            and r.queue = p_tick.queue
            and r.xid = p.xid
        )
    )
$$;
comment on function fairq._has_news(fairq.ticks) is 'Whether there are rings not heard yet, or scheduled tasks due.';

-- sql/functions/_hear_rings.sql

-- Takes the rings that committed since the last tick and returns what they say: the lanes they touch, as they are now.
--
-- Exactly once, without deleting or marking a ring: a ring is new when its transaction is at or past the last tick's next_xid, or
-- was pending then, and the row is visible now. What is visible and what is stored for the next tick come from the snapshot of one
-- statement: two snapshots would hear a ring twice or never, and a ring that tells of freed places may not be heard twice.
--
-- The own transaction is a case of its own: its rings are visible to itself but no snapshot lists it as pending. They are left out
-- here and the transaction is stored as pending, so the next tick hears them. (Promotion hears what its own transaction has to
-- say as p_notes.)
--
-- When more rings wait than p_limit, the pass stops at a transaction id: later ones are left for the next pass.
-- Locks: lanes, rows it replaces; the caller holds the domain.
-- Cost: new rings, one lane each; rings_xid_idx and lanes_pkey.
create function fairq._hear_rings(
  p_tick fairq.ticks,
  p_queue fairq.queues,
  p_clock bigint,
  p_notes fairq.rings[],
  p_limit integer,
  out o_next_xid xid8,
  out o_pending xid8[],
  out o_next_due_at timestamptz,
  out o_cancelled bigint[],
  out o_lane_count bigint,
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
begin
  select r.xid into v_last
  from fairq.rings r
  where r.shard_no = p_tick.shard_no
    and r.queue = p_tick.queue
    and r.xid >= p_tick.next_xid
  order by r.xid
  offset p_limit
  limit 1;

  with ring as materialized (
    select r.group_key, r.priority, r.sequence, r.freed, r.due_at, r.cancelled_id
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid >= p_tick.next_xid
      and r.xid <= coalesce(v_last, '18446744073709551615')
      and r.xid <> v_own
    union all
    select r.group_key, r.priority, r.sequence, r.freed, r.due_at, r.cancelled_id
    from fairq.rings r
    where r.shard_no = p_tick.shard_no
      and r.queue = p_tick.queue
      and r.xid = any(p_tick.pending)
      and r.xid <> v_own
    union all
    select n.group_key, n.priority, n.sequence, n.freed, n.due_at, n.cancelled_id
    from unnest(p_notes) n
  ),
  news as materialized (
    select r.group_key, sum(r.freed)::integer as freed, min(r.sequence) as first_sequence,
      array_agg((r.priority, r.sequence)::fairq.cursor) filter (where r.sequence is not null) as heard
    from ring r
    where r.due_at is null
      and r.cancelled_id is null
    group by r.group_key
  ),
  lane as materialized (
    select n.group_key, n.freed, n.first_sequence, n.heard,
      l.ctid as replaces, l.version, l.lane_no, l.finish, l.position, l.in_flight, l.last_priority,
      l.cursors is null or l.cursors = '{}' as was_idle,
      fairq._merge_cursors(l.cursors, n.heard) as cursors,
      coalesce(g.weight, p_queue.weight) as weight,
      coalesce(g.max_running, p_queue.group_max_running) as max_running
    from news n
    left join lateral (
      select v.ctid, v.version, v.lane_no, v.finish, v.position, v.in_flight, v.last_priority, v.cursors
      from fairq.lanes v
      where v.shard_no = p_tick.shard_no
        and v.queue = p_tick.queue
        and v.group_key = n.group_key
      order by v.version desc
      limit 1
    ) l on true
    left join fairq.groups g on g.shard_no = p_tick.shard_no and g.queue = p_tick.queue and g.group_key = n.group_key
  ),
  numbered as (
    select l.group_key, l.replaces, l.heard, l.first_sequence, l.cursors, l.weight, l.max_running,
      coalesce(l.version, 0) as version,
      coalesce(l.lane_no, p_tick.lane_count + row_number() over (partition by l.lane_no is null order by l.first_sequence)) as lane_no,
      coalesce(l.finish, 0) as finish,
      coalesce(l.last_priority, 0) as last_priority,
      coalesce(l.position, 0) as position,
      greatest(0, coalesce(l.in_flight, 0) - l.freed) as in_flight,
      l.was_idle
    from lane l
  ),
  told as (
    -- A group that was idle, and has not used up its last turn, starts at the clock, before the lanes of that block.
    select n.replaces, n.lane_no,
      (p_tick.shard_no, n.last_priority, n.lane_no, n.version, greatest(n.finish, p_clock),
       case
         when n.was_idle and n.finish <= p_clock then coalesce(fairq._newcomer_position(n.first_sequence), n.lane_no)
         when n.was_idle or n.finish < p_clock then n.lane_no
         else n.position
       end,
       n.weight, n.in_flight, n.max_running,
       n.cursors <> '{}' and fairq._allowance(n.max_running, n.in_flight) > 0,
       p_tick.queue, n.group_key, n.cursors)::fairq.lanes as lane
    from numbered n
  )
  select pg_current_snapshot(),
    (select least(p_tick.next_due_at, min(r.due_at)) from ring r),
    (select array_agg(r.cancelled_id) from ring r where r.cancelled_id is not null),
    greatest(p_tick.lane_count, max(t.lane_no)),
    coalesce(array_agg(t.lane), '{}'),
    array_agg(t.replaces) filter (where t.replaces is not null)
  into v_snapshot, o_next_due_at, o_cancelled, o_lane_count, o_lanes, v_replaced
  from told t;

  o_next_xid := coalesce((v_last::text::bigint + 1)::text::xid8, pg_snapshot_xmax(v_snapshot));
  o_pending := array(
    select p.xid
    from (select pg_snapshot_xip(v_snapshot) union select v_own) p(xid)
    where p.xid < o_next_xid
  );
  o_lane_count := coalesce(o_lane_count, p_tick.lane_count);

  -- From here on these lanes live in o_lanes only, until admission writes their next versions.
  if v_replaced is not null then
    delete from fairq.lanes l
    where l.shard_no = p_tick.shard_no
      and l.ctid = any(v_replaced);
  end if;
end;
$$;
comment on function fairq._hear_rings(fairq.ticks, fairq.queues, bigint, fairq.rings[], integer) is
  'Consumes the rings that committed since the last tick, exactly once.';

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
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'promotion of queue "%" needs READ COMMITTED, this transaction is %', p_queue, upper(current_setting('transaction_isolation'))
      using errcode = 'QF005',
        hint = 'Call it in a transaction of its own. Creating and cancelling tasks work in every isolation level.';
  end if;

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

-- sql/functions/_merge_cursors.sql

-- Cursors of a lane after rings: per priority the smaller sequence, highest priority first.
create function fairq._merge_cursors(p_cursors fairq.cursor[], p_heard fairq.cursor[]) returns fairq.cursor[]
language sql
immutable
as $$
  select coalesce(array_agg((c.priority, c.sequence)::fairq.cursor order by c.priority desc), '{}')
  from (
    select u.priority, min(u.sequence) as sequence
    from unnest(p_cursors || p_heard) u
    group by u.priority
  ) c
$$;
comment on function fairq._merge_cursors(fairq.cursor[], fairq.cursor[]) is 'Lowers the cursors of a lane to what was heard.';

-- sql/functions/_refuse_queue.sql

create function fairq._refuse_queue(p_queue text) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  raise exception 'there is no queue "%"', p_queue
    using errcode = 'QF003',
      hint = format('Create it with: select fairq.configure_queue(%L);', p_queue);
end;
$$;
comment on function fairq._refuse_queue(text) is 'Raises QF003: the queue is unknown.';

-- sql/functions/_tick.sql

-- The newest tick of a domain; nothing when there is none, or when it was written in another life of the database.
-- A restored dump keeps written_by but gets new row headers, so xmin tells; the stored horizon means nothing then.
-- Cost: one entry of ticks_pkey, read backwards, however many dead ticks lie before it.
create function fairq._tick(p_shard_no integer, p_queue text) returns setof fairq.ticks
language sql
stable
as $$
  select n.shard_no, n.written_by, n.tick, n.created_at, n.clock, n.top, n.horizon, n.horizon_position, n.refill_block,
    n.next_xid, n.next_due_at, n.lane_count, n.queue, n.pending
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

-- sql/functions/_wake_due.sql

-- Scheduled tasks that are due become overflow, behind what their groups have waiting.
-- Returns notes (rings that were never stored): the promotion that calls this hears them at once.
-- Locks: tasks, the scheduled rows it moves; the caller holds the domain, so nobody else does.
-- Cost: tasks_due_idx from p_tick.next_due_at on, at most p_limit rows.
create function fairq._wake_due(p_tick fairq.ticks, p_now timestamptz, p_limit integer) returns fairq.rings[]
language sql
volatile
set search_path = ''
as $$
  with due as materialized (
    select t.ctid, t.run_at
    from fairq.tasks t
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.state = 'scheduled'
      and t.run_at >= p_tick.next_due_at
      and t.run_at <= p_now
    order by t.run_at
    limit p_limit
  ),
  numbered as materialized (
    select d.ctid, nextval('fairq.task_ids') as sequence
    from (select due.ctid from due order by due.run_at) d
  ),
  woken as (
    update fairq.tasks t
    set state = 'overflow', sequence = n.sequence
    from numbered n
    where t.shard_no = p_tick.shard_no
      and t.ctid = n.ctid
    returning t.group_key, t.priority, t.sequence
  )
  select coalesce(array_agg(
    (p_tick.shard_no, 0, null, w.sequence, null, null, w.priority, p_tick.queue, w.group_key)::fairq.rings), '{}')
  from (
    select k.group_key, k.priority, min(k.sequence) as sequence
    from woken k
    group by k.group_key, k.priority
  ) w
$$;
comment on function fairq._wake_due(fairq.ticks, timestamptz, integer) is 'Moves due scheduled tasks to overflow.';

-- sql/functions/_write_tick.sql

-- Appends a tick. Inside a savepoint the row's xmin is the subtransaction's, which only the row itself can tell:
-- then written_by is corrected at once, or the next reader would take the tick for a restored one.
create function fairq._write_tick(p_tick fairq.ticks) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_xmin xid;
begin
  insert into fairq.ticks as t (shard_no, queue, tick, created_at, clock, top, horizon, horizon_position, refill_block,
    next_xid, pending, next_due_at, lane_count)
  values (p_tick.shard_no, p_tick.queue, p_tick.tick, p_tick.created_at, p_tick.clock, p_tick.top, p_tick.horizon,
    p_tick.horizon_position, p_tick.refill_block, p_tick.next_xid, p_tick.pending, p_tick.next_due_at, p_tick.lane_count)
  returning t.xmin into v_xmin;

  if v_xmin <> pg_current_xact_id()::xid then
    update fairq.ticks t
    set written_by = v_xmin
    where t.shard_no = p_tick.shard_no
      and t.queue = p_tick.queue
      and t.tick = p_tick.tick;
  end if;
end;
$$;
comment on function fairq._write_tick(fairq.ticks) is 'Appends a tick.';

set local check_function_bodies = on;
