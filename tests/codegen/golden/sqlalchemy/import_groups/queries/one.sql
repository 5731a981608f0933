-- name: CountVisits :one
select count(*) from visits;
