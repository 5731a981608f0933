create table "2fa codes" (
  id int primary key,
  class text not null,
  "from" text,
  "my column" int not null,
  "my-column" int not null
);
create type state as enum ('', '1st', 'a b', 'ab', 'None');
