create type state as enum ('queued', 'running');
create table jobs (id bigint generated always as identity primary key, name text not null, state state not null
  default 'queued', payload jsonb not null default '{}', tags text[]);
create table notes (id bigint primary key, job_id bigint references jobs, body text not null);
comment on table jobs is 'Work to do.';
comment on column jobs.tags is 'Free words.';
