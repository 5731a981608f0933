-- name: AddSample :one
insert into samples (id, mood, raw, words) values ($1, $2, $3, $4) returning *;

-- name: Moods :many
select s.mood, count(*) as found from samples as s group by s.mood;
