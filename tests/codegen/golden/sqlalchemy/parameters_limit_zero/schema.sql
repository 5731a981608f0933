create table items (id int primary key, name text not null, price numeric, weight int, stock int);
