-- name: Billing :many
select id, fee from visits where fee > $1;
