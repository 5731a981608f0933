create schema billing;
create table billing.invoice_lines (id int primary key, "netAmount" numeric not null);
create table customer_addresses (id int primary key, street_name text not null);
create type billing.line_kind as enum ('goods', 'service/extra');
create type parcel_state as enum ('new', 'on-hold', 'sent:out', 'lost/found', 'op!en', 'two words', 'MiXed');
