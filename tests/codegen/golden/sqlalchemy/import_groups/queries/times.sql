-- name: ListTimes :many
select seen_at from visits;
