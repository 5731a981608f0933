create table notes (id int primary key, body text not null, price numeric);
comment on table notes is 'Says "hello"';
comment on column notes.body is E'First line\nsecond line';
create type mark as enum ('say "x"', 'back\slash');
comment on type mark is 'Ends with a \ and "';
