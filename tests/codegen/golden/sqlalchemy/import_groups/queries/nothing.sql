-- name: Vacate :exec
delete from visits;
