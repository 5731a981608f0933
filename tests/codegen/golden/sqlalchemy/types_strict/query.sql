-- name: SpelledByFunctions :one
select now() as at, version() as version, string_to_array('a', ',') as parts, upper('a') as upper;

-- name: SpelledByCasts :one
select now()::timestamp with time zone as at, 'a'::character varying as text, 'day'::clinic.shift as shift;
