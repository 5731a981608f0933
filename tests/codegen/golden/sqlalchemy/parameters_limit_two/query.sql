-- name: NoneAtAll :exec
delete from items;

-- name: JustOne :exec
delete from items where id = $1;

-- name: Three :exec
update items set name = $1, price = $2 where id = $3;

-- name: Four :exec
update items set name = $1, price = $2, weight = $3 where id = $4;

-- name: Five :exec
insert into items (id, name, price, weight, stock) values ($1, $2, $3, $4, $5);

-- name: Between :many
select name from items where id > $1 and id < $2 and weight > $3 and weight < $4;

-- name: Unnamed :one
select $1::int + $2::int + $3::int as total;
