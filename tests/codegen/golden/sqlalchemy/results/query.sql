-- name: One :one
select * from books where id = $1;

-- name: OneScalar :one
select title from books where id = $1;

-- name: Many :many
select id, title from books;

-- name: ManyScalar :many
select id from books;

-- name: FromArchive :many
select * from archive.books;

-- name: OtherOrder :many
select title, id from books;

-- name: Renamed :many
select id, title as name from books;

-- name: TwoTables :many
select b.id, c.title from books as b join covers as c on c.id = b.id;

-- name: Repeated :many
select b.id, c.id, b.title, c.title from books as b join covers as c on c.id = b.id;

-- name: Unnamed :many
select 1 + 1, id from books;

-- name: Exec :exec
delete from books;

-- name: ExecReturning :exec
insert into books (id, title) values ($1, $2) returning *;

-- name: ExecRows :execrows
delete from books where id = $1;

-- name: ExecResult :execresult
update books set title = $2 where id = $1;
