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

-- Its calls are named and used as fairq's. It has only one queue, and its tasks have one attempt.
create function fairq_demo_fifo.create_tasks(p_group_keys text[], p_payloads jsonb[], p_queue text) returns setof bigint language plpgsql as $$
begin
  return query
    insert into fairq_demo_fifo.tasks (group_key, payload)
    select k.group_key, k.payload from unnest(p_group_keys, p_payloads) k(group_key, payload)
    returning tasks.id;
end;
$$;

create function fairq_demo_fifo.finish_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[]) returns setof bigint language plpgsql as $$
begin
  return query
    with ended as (
      delete from fairq_demo_fifo.tasks t where t.id = any(p_ids) and t.state = 'running'
      returning t.id, t.created_at, t.started_at, t.group_key, t.payload
    )
    insert into fairq_demo_fifo.finished_tasks (id, created_at, started_at, group_key, payload)
    select e.id, e.created_at, e.started_at, e.group_key, e.payload from ended e
    returning finished_tasks.id;
end;
$$;

create function fairq_demo_fifo.pop_tasks(p_queue text, p_limit integer, p_worker_id bigint)
returns table (id bigint, attempt integer, group_key text, created_at timestamptz, started_at timestamptz) language plpgsql as $$
begin
  return query
    with next as materialized (
      select t.id from fairq_demo_fifo.tasks t
      where t.state = 'waiting' order by t.id limit p_limit for update skip locked
    ),
    popped as (
      update fairq_demo_fifo.tasks t
      set state = 'running', started_at = clock_timestamp()
      where t.id = any(array(select n.id from next n)) and t.state = 'waiting'
      returning t.id, t.group_key, t.created_at, t.started_at
    )
    select p.id, 1, p.group_key, p.created_at, p.started_at from popped p order by p.id;
end;
$$;
