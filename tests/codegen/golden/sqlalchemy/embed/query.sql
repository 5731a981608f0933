-- name: WithAuthor :many
select sqlc.embed(books), sqlc.embed(authors), length(books.title) as letters
from books
join authors on authors.id = books.author_id;

-- name: JustBook :one
select sqlc.embed(books) from books where books.id = $1;
