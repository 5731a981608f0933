-- name: AddSample :one
insert into samples (
  small, whole, big, exact, rough, yes, body, short, fixed, raw, key, extra, plain, day, clock, zoned, wall, moment,
  span, mood, shift, counts, words, moments, maybe
)
values (
  $1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25
)
returning *;

-- name: AllSamples :many
select * from samples order by id;

-- name: Bodies :many
select s.body from samples as s where s.body like 'a:%' and s.shift = $1 order by s.id;

-- name: Days :many
select * from sample_days order by id;

-- name: Forget :exec
delete from samples where id = sqlc.arg(id);

-- name: Reword :execrows
update samples set words = sqlc.narg(words) where id = any(sqlc.arg(ids)::bigint[]);

-- name: Touch :execresult
update samples set maybe = sqlc.narg(maybe);
