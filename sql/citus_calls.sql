-- The tables whose rows are calls. fairq/citus.py loads this on the coordinator, when each node has citus.sql; it leaves alone what has been done already.
-- Each statement is sent by itself, and ends at the end of a line.
-- The tables are made on this node alone, then Citus spreads them.
set citus.enable_ddl_propagation = off;
create table if not exists fairq_citus.calls (
  shard_no integer not null,
  no bigint,
  statement varchar,
  answer jsonb,
  primary key (shard_no, no)
);
create table if not exists fairq_citus.settings_calls (
  no bigint primary key,
  statement varchar,
  answer jsonb
);
revoke all on fairq_citus.calls, fairq_citus.settings_calls from public;

set citus.enable_ddl_propagation = on;
set citus.enable_unsafe_triggers = on;
select create_reference_table('fairq_citus.settings_calls')
where not exists (select from pg_dist_partition where logicalrelid = 'fairq_citus.settings_calls'::regclass);
select create_distributed_table('fairq_citus.calls', 'shard_no', colocate_with => 'none')
where not exists (select from pg_dist_partition where logicalrelid = 'fairq_citus.calls'::regclass);

create or replace trigger answer before insert on fairq_citus.calls for each row execute function fairq_citus.answer();
create or replace trigger answered after insert on fairq_citus.calls for each row execute function fairq_citus.answered();
create or replace trigger answer before insert on fairq_citus.settings_calls for each row execute function fairq_citus.answer();
create or replace trigger answered after insert on fairq_citus.settings_calls for each row execute function fairq_citus.answered();
set citus.enable_ddl_propagation = off;
