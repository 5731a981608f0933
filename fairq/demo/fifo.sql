-- The plain queue of the demo: what most applications write for themselves, done well. One row per task, "for update skip locked" in
-- the order of arrival over a partial index, history in a table of its own; written ahead and flushed like everything of fairq.
create schema fairq_demo_fifo;

create table fairq_demo_fifo.tasks (
  id bigint generated always as identity primary key,
  created_at timestamptz not null default statement_timestamp(), -- one moment for all tasks of a call, as in fairq
  started_at timestamptz,
  state text not null default 'waiting',
  group_key text not null,
  payload jsonb not null,
  constraint state_is_known check (state in ('waiting', 'running'))
);
create index tasks_waiting_idx on fairq_demo_fifo.tasks (id) where state = 'waiting';

create table fairq_demo_fifo.finished_tasks (
  id bigint not null,
  created_at timestamptz not null,
  started_at timestamptz not null,
  finished_at timestamptz not null default clock_timestamp(),
  group_key text not null,
  payload jsonb not null
);
create index finished_tasks_id_idx on fairq_demo_fifo.finished_tasks (id);
