-- name: Casts :many
-- A comment above the statement is dropped.
select id::bigint as id, line
from logs -- one beside it stays: here
where at > $1::timestamptz
  and line like 'a:%'
  and id = any($2::int[]);

-- name: Cost :one
select '$5'::text || $1::text as price, line, id from logs where id=$2;
