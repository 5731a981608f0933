-- name: CopyJobs :copyfrom
insert into jobs (name, payload, tags) values (@name, @payload, @tags);

-- name: CopyStates :copyfrom
-- fairq: raw payload
insert into jobs (name, state, payload) values ($1, $2, $3);

-- name: CopyNames :copyfrom
insert into jobs (name) values ($1);

-- name: JobsWithNotes :many
select sqlc.embed(j), sqlc.embed(n), n.body from jobs j left join notes n on n.job_id = j.id order by j.id;

-- name: AddNote :exec
insert into notes (id, job_id, body) values ($1, $2, $3);

-- name: Nobody :one
-- fairq: always
select name from jobs where false;

-- name: NullAlways :one
-- fairq: always
select max(id) as top from jobs;

-- name: Fail :one
select 1 / @zero::int as x;

-- name: Names :many
select conn, "driver", "class", "from" from (values (@conn::int, @driver::int, @class::int, 1)) as
  v (conn, "driver", "class", "from");
