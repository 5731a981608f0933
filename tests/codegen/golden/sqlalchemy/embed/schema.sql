create table authors (id int primary key, name text not null);
create table books (id int primary key, author_id int not null, title text not null);
