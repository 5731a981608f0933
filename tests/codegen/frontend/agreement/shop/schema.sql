create schema shop;
create type shop.state as enum ('new', 'paid');
create table shop.orders (
  id bigint generated always as identity primary key,
  customer text not null,
  state shop.state not null default 'new',
  total numeric(10, 2) not null,
  note varchar(80),
  tags text[] not null default '{}',
  payload jsonb not null,
  placed_at timestamp with time zone not null default now()
);
create table shop.lines (order_id bigint not null references shop.orders, line_no int not null, what text not null);
create view shop.paid as select id, customer, note from shop.orders where state = 'paid';
create function shop.take(p_limit int) returns setof shop.orders language sql as 'select * from shop.orders limit $1';
create function shop.place(p_customer text, p_payloads jsonb[], p_note text default null) returns bigint
  language sql as 'select 1::bigint';
create function shop.totals() returns table (customer text, total numeric) language sql
  as 'select customer, sum(total) from shop.orders group by 1';
