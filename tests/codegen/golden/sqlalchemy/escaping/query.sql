-- name: Digits :many
select id from notes where body ~ '^\d+:\s$' and body <> E'\n' and body <> '$1' and price > $1;

-- name: Quoted :many
select id as """id""" from notes;
