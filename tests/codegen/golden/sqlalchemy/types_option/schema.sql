create domain amount as numeric(12, 2) check (value >= 0);
create table offers (
  id bigint primary key,
  price amount not null,
  pages int4range,
  place point,
  spans int4range[] not null
);
