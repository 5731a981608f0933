-- name: AddJob :one
-- Adds a job; says "hello" with a backslash \ and a quote "
-- fairq: always
insert into jobs (name, payload, tags) values (@name, @payload, @tags) returning *;

-- name: GetJob :one
select * from jobs where id = $1;

-- name: CountJobs :one
-- fairq: always
select count(*) from jobs;

-- name: JobName :one
select name from jobs where id = $1;

-- name: ListJobs :many
select id, name, state, payload from jobs where state = sqlc.narg(state) or sqlc.narg(state) is null order by id;

-- name: JobIds :many
select id from jobs where name = any(@names::text[]) order by id;

-- name: RenameJobs :execrows
update jobs set name = @name where id = any(@ids::bigint[]);

-- name: DeleteJobs :exec
delete from jobs;

-- name: TouchJobs :execresult
update jobs set name = name || '%s "quoted" \n' || E'\\';

-- name: RawJobs :many
-- fairq: raw payload
select id, payload, jsonb_build_object('n', name) as decoded from jobs order by id;

-- name: AddRawJobs :exec
-- fairq: raw
insert into jobs (name, payload) select n, p from unnest(@names::text[], @payloads::jsonb[]) as s (n, p);

-- name: AddJobs :exec
insert into jobs (name, payload) select n, p from unnest(@names::text[], @payloads::jsonb[]) as s (n, p);

