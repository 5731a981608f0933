-- name: CheaperThan :many
select id, price from offers where price < sqlc.arg(price)::amount;

-- name: PagesOf :one
select pages from offers where id = $1;
