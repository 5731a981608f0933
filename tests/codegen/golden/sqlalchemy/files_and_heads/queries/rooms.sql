-- name: GetRoom :one
select id, name from rooms where id = $1;
