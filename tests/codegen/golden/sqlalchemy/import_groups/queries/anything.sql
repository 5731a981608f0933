-- name: Extras :execrows
update visits set extra = $1, fee = $2;
