create schema archive;
create table books (id int primary key, title text not null);
create table archive.books (id int primary key, title text not null);
create table covers (id int primary key, title text not null);
