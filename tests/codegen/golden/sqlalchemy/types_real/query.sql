-- name: SpelledByFunctions :one
select now() as at, version() as version, string_to_array('a', ',') as parts;

-- name: SpelledByCasts :one
select now()::timestamp with time zone as at, 'a'::character varying as text, 'day'::clinic.shift as shift;

-- name: OnShift :many
select * from recent where a_shift = $1;

-- name: Forget :exec
select pg_sleep($1);
