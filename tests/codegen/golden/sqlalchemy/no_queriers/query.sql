-- name: ListRooms :many
select id, name from rooms;

-- name: RoomNames :many
select name, id from rooms;
