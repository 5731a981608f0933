-- A plain FIFO queue with the durability and the history of fairq: what "for update skip locked" gives without fairness.
create schema bench_fifo;

create table bench_fifo.tasks (
  id bigint generated always as identity primary key,
  created_at timestamptz not null default clock_timestamp(),
  started_at timestamptz,
  worker_id bigint,
  attempt integer not null default 0,
  max_attempts integer not null default 5,
  queue text not null default 'default',
  state text not null default 'queued',
  group_key text not null,
  kind text not null default 'default',
  payload jsonb not null
);
create index on bench_fifo.tasks (queue, id) where state = 'queued';

create table bench_fifo.finished_tasks (
  id bigint not null,
  created_at timestamptz not null,
  started_at timestamptz not null,
  finished_at timestamptz not null,
  worker_id bigint not null,
  attempt integer not null,
  max_attempts integer not null,
  queue text not null,
  outcome text not null,
  group_key text not null,
  kind text not null,
  payload jsonb not null,
  result jsonb
);
create index on bench_fifo.finished_tasks (id);

create function bench_fifo.pop_tasks(p_queue text, p_limit integer, p_worker_id bigint) returns setof bench_fifo.tasks
language plpgsql
set plan_cache_mode = 'force_generic_plan'
as $$
begin
  return query
    with next as materialized (
      select t.ctid
      from bench_fifo.tasks t
      where t.queue = p_queue
        and t.state = 'queued'
      order by t.id
      limit p_limit
      for update skip locked
    ),
    popped as (
      update bench_fifo.tasks t
      set state = 'running', worker_id = p_worker_id, attempt = t.attempt + 1, started_at = clock_timestamp()
      where t.ctid = any(array(select n.ctid from next n))
      returning t.*
    )
    select p.* from popped p order by p.id;
end;
$$;

create function bench_fifo.finish_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[]) returns setof bigint
language plpgsql
set plan_cache_mode = 'force_generic_plan'
as $$
begin
  return query
    with input as materialized (
      select i.id, i.attempt from unnest(p_ids, p_attempts) as i(id, attempt)
    ),
    ended as (
      delete from bench_fifo.tasks t
      using input i
      where t.id = i.id
        and t.attempt = i.attempt
        and t.worker_id = p_worker_id
      returning t.*
    ),
    history as (
      insert into bench_fifo.finished_tasks (id, created_at, started_at, finished_at, worker_id, attempt, max_attempts, queue, outcome, group_key, kind, payload)
      select e.id, e.created_at, e.started_at, clock_timestamp(), e.worker_id, e.attempt, e.max_attempts, e.queue, 'succeeded', e.group_key, e.kind, e.payload
      from ended e
    )
    select e.id from ended e;
end;
$$;
