-- name: Shelf :one
select * from shelves where id = $1;

-- name: Labels :many
select label from shelves;

-- name: SetCodes :exec
update shelves set codes = sqlc.arg(codes), label = sqlc.narg(label) where id = any(sqlc.arg(ids)::int[]);
