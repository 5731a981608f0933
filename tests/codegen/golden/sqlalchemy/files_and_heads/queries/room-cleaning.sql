-- name: RenameRoom :exec
update rooms set name = $2 where id = $1;
