-- name: WithNotes :many
select notes from visits where notes && $1::text[];
