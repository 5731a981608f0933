-- name: One :one
select * from books where id = $1;

-- name: Many :many
select * from books;
