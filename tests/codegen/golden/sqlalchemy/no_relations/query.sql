-- name: Answer :one
select 42::int as answer;
