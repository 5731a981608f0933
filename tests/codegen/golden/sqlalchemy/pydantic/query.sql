-- name: SmallParcels :many
-- Comments like this one do not reach the Python code.
select * from parcels where size = $1;

-- name: Sizes :many
select size, note from parcels;

-- name: Resize :execrows
update parcels set size = $1, note = $2 where id = $3;
