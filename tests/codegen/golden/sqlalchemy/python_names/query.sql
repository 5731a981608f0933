-- name: Between :many
select class from "2fa codes" where id > $1 and id < $2 and "from" = sqlc.arg(self);

-- name: Import :many
select * from "2fa codes";

-- name: Twice :many
select "my column", "my column" from "2fa codes" where class = $1;
