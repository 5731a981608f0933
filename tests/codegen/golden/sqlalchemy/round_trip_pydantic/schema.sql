create type mood as enum ('calm', 'cross');
create table samples (id int primary key, mood mood not null, raw bytea, words text[] not null);
