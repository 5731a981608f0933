create schema "Odd Schema";
create type "Odd Schema"."in-progress" as enum ('a', '', '9', 'a-b', 'a/b', 'a b', 'class', '0/', '--x', '_', $$it's "q" \ $$);
create table "Odd Schema"."Order Lines" (
  "class" int not null, "Some Column" text not null, "1st" "Odd Schema"."in-progress", uuid uuid, "date" date,
  "datetime" timestamptz, "int" int, "str" text, "__x__" int);
