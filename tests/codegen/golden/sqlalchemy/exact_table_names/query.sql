-- name: WorstBox :one
select max(id)::int from boxes;
