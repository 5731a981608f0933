-- name: AddSheet :exec
insert into sheets (id, grid, cubes) values (@id, @grid, @cubes);

-- name: GetSheet :one
select * from sheets where id = @id;

-- name: Grids :many
-- The same type as in the row of the table.
select id, grid from sheets where grid = @same;
