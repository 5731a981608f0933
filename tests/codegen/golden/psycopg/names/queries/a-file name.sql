-- name: GetOrderLines :many
select * from "Odd Schema"."Order Lines" where "Some Column" = @some_column;

-- name: AQueryWithANameThatIsFarTooLongForOneLineOfCodeToHoldItAll :one
-- First line of a comment.
--
-- Third line: a \ and """quotes""".
select "class", "Some Column", uuid, "date", "datetime", "int", "str", 1, 2, "1st", "1st"
  from "Odd Schema"."Order Lines" o
 where uuid = sqlc.narg(a_parameter_with_a_name_that_is_long_too)::uuid
   and "class" = any(@the_second_parameter_is_an_array_of_numbers::int[])
   and "Some Column" > @conn and "int" = @driver and 'a"""' <> 'b\n"' limit @rows;

-- name: CopyOrderLines :copyfrom
insert into "Odd Schema"."Order Lines" ("class", "Some Column", "1st", "int") values ($1, $2, $3, $4);

-- name: getHTTPCode :exec
select 1;
