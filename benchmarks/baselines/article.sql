-- The ways of the 2024 article on multi-tenant queues, in our own words, to measure against: a queue ordered by id, served plainly, through a window
-- function, through a lateral join per group, or in the order of block ids that are assigned when a task is created.
create schema bench_article;

create table bench_article.groups (
  group_no bigint generated always as identity primary key,
  group_key text not null unique,
  last_block bigint not null
);

create table bench_article.served (
  only_row boolean primary key default true check (only_row),
  block bigint not null default 0
);
insert into bench_article.served default values;

create table bench_article.tasks (
  id bigint primary key,
  state text not null default 'queued',
  group_no bigint not null,
  created_at timestamptz not null default clock_timestamp(),
  started_at timestamptz,
  payload jsonb not null
);
create index on bench_article.tasks (id) where state = 'queued';

create table bench_article.finished_tasks (
  id bigint not null,
  group_no bigint not null,
  created_at timestamptz not null,
  started_at timestamptz not null,
  finished_at timestamptz not null,
  payload jsonb not null
);
create index on bench_article.finished_tasks (id);

-- The same tasks in order of arrival: what the first three ways choose from.
create table bench_article.arrivals (
  id bigint generated always as identity primary key,
  state text not null default 'queued',
  group_no bigint not null,
  payload jsonb not null
);
create index on bench_article.arrivals (id) where state = 'queued';
create index on bench_article.arrivals (group_no, id) where state = 'queued';

-- A group's next block is one past its last, but not before the block being served. The group's row stays locked until the caller commits.
create function bench_article.create_task(p_group_key text, p_payload jsonb) returns bigint
language sql
as $$
  with served as (
    select s.block from bench_article.served s
  ),
  turn as (
    insert into bench_article.groups as g (group_key, last_block)
    select p_group_key, s.block from served s
    on conflict (group_key) do update
    set last_block = greatest(g.last_block + 1, (select s.block from served s))
    returning g.group_no, g.last_block
  )
  insert into bench_article.tasks (id, group_no, payload)
  select t.last_block * 1048576 + t.group_no, t.group_no, p_payload from turn t
  returning id
$$;

create function bench_article.pop_tasks(p_limit integer) returns setof bench_article.tasks
language sql
as $$
  with next as materialized (
    select t.id
    from bench_article.tasks t
    where t.state = 'queued'
    order by t.id
    limit p_limit
    for update skip locked
  ),
  moved as (
    update bench_article.served s
    set block = greatest(s.block, (select max(n.id) / 1048576 from next n))
    where exists (select from next)
  )
  update bench_article.tasks t
  set state = 'running', started_at = clock_timestamp()
  where t.id = any(array(select n.id from next n))
  returning t.*
$$;

create function bench_article.finish_tasks(p_worker_id bigint, p_ids bigint[], p_attempts integer[]) returns setof bigint
language sql
as $$
  with ended as (
    delete from bench_article.tasks t
    where t.id = any(p_ids)
    returning t.*
  ),
  history as (
    insert into bench_article.finished_tasks (id, group_no, created_at, started_at, finished_at, payload)
    select e.id, e.group_no, e.created_at, e.started_at, clock_timestamp(), e.payload
    from ended e
  )
  select e.id from ended e
$$;
