create table books (id int primary key, title text not null);
