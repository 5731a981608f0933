create schema clinic;
create type clinic.shift as enum ('day', 'night/late');
create type mood as enum ('calm', 'cross');
create table samples (
  id bigint generated always as identity primary key,
  small smallint not null,
  whole int not null,
  big bigint not null,
  exact numeric(20, 5) not null,
  rough double precision not null,
  yes boolean not null,
  body text not null,
  short varchar(20) not null,
  fixed char(3) not null,
  raw bytea not null,
  key uuid not null,
  extra jsonb not null,
  plain json not null,
  day date not null,
  clock time not null,
  zoned timetz not null,
  wall timestamp not null,
  moment timestamptz not null,
  span interval not null,
  mood mood not null,
  shift clinic.shift not null,
  counts int[] not null,
  words text[],
  moments timestamptz[] not null,
  maybe int
);
create view sample_days as select s.id, s.day, s.shift, s.words from samples as s;
