create table rooms (id bigint primary key, name text not null);
