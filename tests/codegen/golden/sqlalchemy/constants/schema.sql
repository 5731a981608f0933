create table logs (id int primary key, line text not null, at timestamptz not null);
