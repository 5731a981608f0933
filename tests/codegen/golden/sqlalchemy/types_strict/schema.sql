create schema clinic;
create type clinic.shift as enum ('day', 'night');
create type mood as enum ('calm', 'cross');
create table samples (
  a_int int not null, a_integer integer not null, a_int2 int2 not null, a_int4 int4 not null,
  a_int8 int8 not null, a_bigint bigint not null, a_smallint smallint not null,
  a_serial serial, a_bigserial bigserial, a_smallserial smallserial,
  a_serial2 serial2, a_serial4 serial4, a_serial8 serial8,
  a_float float not null, a_float4 float4 not null, a_float8 float8 not null,
  a_real real not null, a_double double precision not null,
  a_numeric numeric(10, 2) not null, a_decimal decimal not null, a_money money not null,
  a_bool bool not null, a_boolean boolean not null,
  a_json json not null, a_jsonb jsonb not null, a_bytea bytea not null,
  a_date date not null, a_time time not null, a_timetz timetz not null, a_time_with time with time zone not null,
  a_timestamp timestamp not null, a_timestamptz timestamptz not null,
  a_timestamp_with timestamp with time zone not null, a_precise timestamptz(3) not null,
  an_interval interval not null,
  a_text text not null, a_varchar varchar not null, a_varying character varying (10) not null,
  a_char char(3) not null, a_bpchar bpchar not null, a_name name not null,
  a_uuid uuid not null, an_inet inet not null, a_cidr cidr not null,
  a_macaddr macaddr not null, a_macaddr8 macaddr8 not null,
  a_mood mood not null,
  a_shift clinic.shift not null, a_point point not null, a_range int4range not null, an_xml xml not null
);
