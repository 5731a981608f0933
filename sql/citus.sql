-- Citus: how a call gets from any node to the one that has the group. Only fairq/citus.py loads this, on each node, after the engine.
--
-- Each node has an engine of its own, the same as on a single machine, for the groups whose slot it has. Citus carries the calls: a call is a row, and
-- a trigger on the row's node runs it, in the same distributed transaction. So a task commits together with what the application wrote on other nodes, or
-- not at all. "calls" is distributed by shard_no, the slot of a group: one insert, answered by one node. "settings_calls" is a reference table: an insert
-- reaches every node, or none.
-- The engine's own create_task and others move to schema fairq_citus, and run on the node itself. Functions in schema fairq with the same names and
-- arguments pass the call on.
create schema if not exists fairq_citus;
revoke all on schema fairq_citus from public;
comment on schema fairq_citus is 'Calls of fairq from one node to another.';

-- Checks of rights on the other node see the owner of fairq as the caller. So the owner gets all rights, as operators have them, even if it is no superuser.
do $$
begin
  if not pg_has_role('fairq_admin', 'usage') then execute format('grant fairq_admin to %I', current_user); end if;
end;
$$;

create sequence if not exists fairq_citus.call_ids;

-- The slot of a group, by which "calls" is distributed. Citus spreads the slots over its shards.
create or replace function fairq_citus.slot(p_group_key text) returns integer
language sql immutable parallel safe
as $$ select fairq._shard_of(coalesce(p_group_key, ''), 65536) $$;

-- The slot of a group; without a group null, for all nodes.
create or replace function fairq_citus.slot_or_all(p_group_key text) returns integer
language sql immutable parallel safe
as $$ select case when p_group_key is not null then fairq_citus.slot(p_group_key) end $$;

-- The node that has a slot, by its number in Citus (groupid).
create or replace function fairq_citus.node_of(p_slot integer) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  return (select p.groupid from pg_dist_placement p where p.shardid = get_shard_id_for_distribution_column('fairq_citus.calls', p_slot));
end;
$$;

-- A slot of the node that gave out this id: the bits above the lowest 48 are its number. Any slot when no such node is known: then no node knows the task.
-- Raises QF007 when that node has no slot.
create or replace function fairq_citus.slot_of_task(p_id bigint) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_node integer := coalesce(p_id, 0) >> 48;
  v_slot integer;
begin
  if not exists (select from pg_dist_node n where n.groupid = v_node) then
    return 0;
  end if;
  if exists (
    select
    from pg_dist_placement p
    join pg_dist_shard h using (shardid)
    where h.logicalrelid = 'fairq_citus.calls'::regclass and p.groupid = v_node
  ) then
    select s.slot into v_slot from generate_series(0, 65535) s(slot) where fairq_citus.node_of(s.slot) = v_node limit 1;
  end if;
  if v_slot is null then
    raise exception 'no group lives on the node of task %', p_id
      using errcode = 'QF007', hint = 'Connect to that node and ask there, or give it groups: select rebalance_table_shards(''fairq_citus.calls'');';
  end if;
  return v_slot;
end;
$$;

-- On the other node the caller is the owner of fairq. So the right to enqueue is checked here.
create or replace function fairq_citus.check_caller(p_queue text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_role text := (select q.enqueue_role from fairq.queues q where q.queue = p_queue);
begin
  if v_role is not null then perform fairq._check_role(p_queue, v_role); end if;
end;
$$;

-- Only the task's node knows its queue. So the call tells that node which queues the caller may not ask about; tasks of these count as unknown (id 0).
create or replace function fairq_citus.hidden() returns text[]
language sql stable set search_path = pg_catalog, pg_temp
as $$ select array(select q.queue from fairq.queues q where q.enqueue_role is not null and not fairq._may_ask(q.queue)) $$;

create or replace function fairq_citus.shown(p_id bigint, p_hidden text[]) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if p_hidden <> '{}' and exists (
    select from fairq._shards(null) s(shard_no) join fairq.tasks t on t.shard_no = s.shard_no where t.id = p_id and t.queue = any(p_hidden)
    union all
    select from fairq._shards(null) s(shard_no) join fairq.finished_tasks f on f.shard_no = s.shard_no where f.id = p_id and f.queue = any(p_hidden)
  ) then
    return 0;
  end if;
  return p_id;
end;
$$;

-- The call also tells the node which role calls for a worker.
-- Raises 42501 (see fairq._check_worker).
create or replace function fairq_citus.worker_of(p_id bigint, p_caller text) returns bigint
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._check_worker(s.shard_no, p_id, p_caller) from fairq._shards(null) s(shard_no);
  return p_id;
end;
$$;

-- Runs a statement on the node of a slot, or on all nodes; returns the answer of one of them. A question (p_asks) writes nothing: it is a query on the same
-- table, so it works in a read-only transaction. "having" without groups gives one row, though the table is empty. A question without a slot is for this node.
-- The statement travels as a literal, behind what the caller has SET LOCAL. standard_conforming_strings may be among that, so the statement is in base64,
-- without anything to escape; and search_path, so its type is one that the grammar knows, and no other name is looked up.
create or replace function fairq_citus.pass_on(p_slot integer, p_statement text, p_asks boolean) returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_statement character varying := encode(convert_to(p_statement, 'UTF8'), 'base64');
  v_answer jsonb;
begin
  if p_asks and p_slot is null then
    v_answer := fairq_citus.answer_to(v_statement);
  elsif p_asks then
    execute format('select fairq_citus.answer_to(%L::character varying) from fairq_citus.calls where shard_no = %s having true', v_statement, p_slot)
      into v_answer;
  elsif p_slot is null then
    insert into fairq_citus.settings_calls (statement) values (v_statement) returning answer into v_answer;
  else
    insert into fairq_citus.calls (shard_no, statement) values (p_slot, v_statement) returning answer into v_answer;
  end if;
  return v_answer;
end;
$$;

create or replace function fairq_citus.answer_to(p_statement character varying) returns jsonb
language plpgsql set search_path = pg_catalog, pg_temp set jit = off as $$
declare
  v_answer jsonb;
begin
  execute convert_from(decode(p_statement, 'base64'), 'UTF8') into v_answer;
  return v_answer;
end;
$$;

-- The triggers run the call and delete its row again, on the node of the row, in the caller's transaction.
create or replace function fairq_citus.answer() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  new.no := nextval('fairq_citus.call_ids');
  new.answer := fairq_citus.answer_to(new.statement);
  new.statement := null;
  return new;
end;
$$;

-- Deletes the row by its ctid, never by a scan, however small the table: reading other calls' rows would make serializable transactions fail.
create or replace function fairq_citus.answered() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off as $$
begin
  execute format('delete from %I.%I where ctid = $1', tg_table_schema, tg_table_name) using new.ctid;
  return null;
end;
$$;

-- A transaction that notifies cannot commit in two phases. So tasks are not announced on Citus: workers look for themselves.
-- Raises QF007.
create or replace function fairq_citus.refuse_notify() returns trigger
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'queue "%" cannot announce its tasks by NOTIFY: a transaction that did could not commit on several nodes', new.queue
    using errcode = 'QF007', hint = 'Leave "notify" false; workers look for tasks themselves.';
end;
$$;

-- The elements of an array at these places, in this order. Of an array of another length none, which the engine then refuses.
create or replace function fairq_citus.only(p_array anyarray, p_length integer, p_places bigint[]) returns anyarray
language sql immutable set search_path = pg_catalog, pg_temp as $$
  select case
    when p_array is null then null
    when cardinality(p_array) <> p_length then p_array[1 : 0]
    else (
      select array_agg(a.element order by a.place)
      from unnest(p_array) with ordinality a(element, place)
      join unnest(p_places) p(place) using (place)
    )
  end
$$;

-- The nodes that have these groups: for each node one of its slots, and the places of its groups in the array. In the order of the nodes, so that two batches
-- never wait for each other in a circle.
create or replace function fairq_citus.parts(p_group_keys text[]) returns table (slot integer, places bigint[])
language sql stable set search_path = pg_catalog, pg_temp as $$
  with task as materialized (
    select fairq_citus.slot(k.group_key) as slot, k.place from unnest(p_group_keys) with ordinality k(group_key, place)
  ),
  home as materialized (
    select d.slot, fairq_citus.node_of(d.slot) as node from (select distinct t.slot from task t) d
  )
  select min(t.slot), array_agg(t.place order by t.place)
  from task t
  join home h on h.slot = t.slot
  group by h.node
  order by h.node
$$;

-- The settings, which are the same on every node. Counters and lanes are each node's own.
create or replace function fairq_citus.settings() returns jsonb
language sql stable set search_path = pg_catalog, pg_temp
as $$
  select jsonb_build_object(
    'queues', (select coalesce(jsonb_agg(q), '[]') from fairq.queues q),
    'kinds', (select coalesce(jsonb_agg(k), '[]') from fairq.kinds k),
    'groups', (select coalesce(jsonb_agg(g), '[]') from fairq.groups g),
    'settings', (select coalesce(jsonb_agg(s), '[]') from fairq.settings s))
$$;

-- Gives this node its number and the settings. Returns false, and changes nothing, when it has tasks from before.
create or replace function fairq_citus.become(p_node integer, p_settings jsonb) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_shards constant jsonb := jsonb_build_object('shard_count', p_settings -> 'settings' -> 0 -> 'shard_count');
  v_first_id constant bigint := (p_node::bigint << 48) + 1;
begin
  -- It has not had this number before, though perhaps another one.
  if (select i.last_value >> 48 from fairq.task_ids i) <> p_node then
    if exists (select from fairq.tasks) then
      return false;
    end if;
    if to_regproc('fairq_citus.configure_cluster') is null then
      perform fairq.configure_cluster(v_shards);
    else
      perform fairq_citus.configure_cluster(v_shards);
    end if;
    delete from fairq.queues;
    delete from fairq.kinds;
    delete from fairq.groups;
    delete from fairq.settings;
    insert into fairq.queues select * from jsonb_populate_recordset(null::fairq.queues, p_settings -> 'queues');
    insert into fairq.kinds select * from jsonb_populate_recordset(null::fairq.kinds, p_settings -> 'kinds');
    insert into fairq.groups select * from jsonb_populate_recordset(null::fairq.groups, p_settings -> 'groups');
    insert into fairq.settings select * from jsonb_populate_recordset(null::fairq.settings, p_settings -> 'settings');
    -- Its own groups are in their places already, even if groups of other nodes are still moving.
    update fairq.settings set moving_from = null;
    perform fairq._open_domain(s, q.queue) from fairq.queues q, fairq._shards(null) s;
  end if;
  -- Ids of workers name the node, too: if an address leads to another node one day, its worker is not taken for one of that node.
  perform setval('fairq.worker_ids', v_first_id) from fairq.worker_ids i where i.last_value >> 48 <> p_node;
  perform setval('fairq.task_ids', v_first_id) from fairq.task_ids i where i.last_value >> 48 <> p_node;
  return true;
end;
$$;

-- Replaces the functions that are called for a group or a task, and those that concern all nodes, by ones that pass the call on. The originals go to schema
-- fairq_citus. It can run again: a migration may have created some of them anew.
create or replace function fairq_citus.enter() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $enter$
declare
  v_call record;
  v_statement text;
  v_pass_on text;
  v_body text;
begin
  if not exists (select from pg_catalog.pg_trigger t where t.tgname = 'refuse_notify') then
    alter table fairq.queues alter notify set default false;
    update fairq.queues set notify = false where notify;
    create trigger refuse_notify before insert or update on fairq.queues
    for each row when (new.notify) execute function fairq_citus.refuse_notify();
  end if;

  for v_call in
    select p.proname as name, p.proargnames[1 : p.pronargs] as names, p.proretset as is_set, t.typtype = 'c' as is_row,
      pg_get_functiondef(p.oid) as definition, pg_get_function_arguments(p.oid) as arguments,
      pg_get_function_result(p.oid) as result, c.name in ('task_result', 'task_progress', 'explain_task', 'rate_usage') as asks, c.slot,
      a.names as arguments_here, a.formats as arguments_there
    from (
      values
        ('create_task', 'fairq_citus.slot(p_group_key)'), ('create_tasks', 'v_part.slot'), ('purge_group', 'fairq_citus.slot(p_group_key)'),
        ('configure_schedule', 'fairq_citus.slot(p_group_key)'), ('pause_schedule', 'fairq_citus.slot_or_all(p_group_key)'),
        ('resume_schedule', 'fairq_citus.slot_or_all(p_group_key)'), ('remove_schedule', 'fairq_citus.slot_or_all(p_group_key)'),
        ('run_schedule', 'fairq_citus.slot_or_all(p_group_key)'),
        ('cancel_task', 'fairq_citus.slot_of_task(p_id)'), ('retry_task', 'fairq_citus.slot_of_task(p_id)'),
        ('finish_tasks', 'fairq_citus.slot_of_task(p_ids[1])'),
        ('configure_cluster', 'null'), ('configure_queue', 'null'), ('configure_group', 'null'), ('configure_user', 'null'), ('configure_key', 'null'),
        ('configure_kind', 'null'), ('pause_queue', 'null'), ('resume_queue', 'null'), ('drain_queue', 'null'), ('pause_group', 'null'),
        ('resume_group', 'null'), ('hold_group', 'null'), ('hold_key', 'null'), ('reset_rate', 'null'),
        -- These only ask.
        ('task_result', 'fairq_citus.slot_of_task(p_id)'), ('task_progress', 'fairq_citus.slot_of_task(p_id)'),
        ('explain_task', 'fairq_citus.slot_of_task(p_id)'), ('rate_usage', 'fairq_citus.slot_or_all(p_group_key)')
    ) c(name, slot)
    join pg_catalog.pg_proc p on p.pronamespace = 'fairq'::regnamespace and p.proname = c.name
    join pg_catalog.pg_type t on t.oid = p.prorettype
    cross join lateral (
      -- Some calls carry more than their arguments: queues hidden from the caller, or its role.
      select string_agg(
          case
            when c.name = 'create_tasks' and n.type like '%[]' then format('fairq_citus.only(%I, v_length, v_part.places)', n.name)
            when c.name in ('cancel_task', 'task_result', 'task_progress') and n.name = 'p_id' then 'p_id, fairq_citus.hidden()'
            when c.name = 'finish_tasks' and n.name = 'p_worker_id' then 'p_worker_id, fairq._caller()'
            else quote_ident(n.name)
          end, ', ' order by n.place) as names,
        string_agg(
          case
            when c.name in ('cancel_task', 'task_result', 'task_progress') and n.name = 'p_id' then 'fairq_citus.shown(%L, %L)'
            when c.name = 'finish_tasks' and n.name = 'p_worker_id' then 'fairq_citus.worker_of(%L, %L)'
            else '%L::' || n.type
          end, ', ' order by n.place) as formats
      from (
        select u.name, u.type::regtype::text, u.place
        from unnest(p.proargnames[1 : p.pronargs], p.proargtypes::oid[]) with ordinality u(name, type, place)
      ) n(name, type, place)
    ) a
    where p.prosrc not like '%fairq_citus.pass_on(%'
  loop
    -- The engine's own function. What it calls of its like runs on the same node.
    v_statement := replace(v_call.definition, 'FUNCTION fairq.' || v_call.name || '(', 'FUNCTION fairq_citus.' || v_call.name || '(');
    execute replace(v_statement, ' fairq.create_task(', ' fairq_citus.create_task(');
    execute format('revoke all on function fairq_citus.%I from public', v_call.name);

    v_statement := format('select jsonb_agg(f) from fairq_citus.%I(%s) f', v_call.name, v_call.arguments_there);
    v_pass_on := format('fairq_citus.pass_on(%s, format(%L, %s), %L)', v_call.slot, v_statement, v_call.arguments_here, v_call.asks);
    if v_call.name = 'create_tasks' then
      v_body := format($body$
declare
  v_length integer := coalesce(cardinality(p_group_keys), 0);
  v_places bigint[];
  v_ids bigint[];
  v_part record;
begin
  perform fairq_citus.check_caller(p_queue);
  for v_part in select p.slot, p.places from fairq_citus.parts(case when v_length > 0 then p_group_keys else array[null::text] end) p loop
    v_places := v_places || v_part.places;
    v_ids := v_ids || array(select e.id::bigint from jsonb_array_elements_text(%s) e(id));
  end loop;
  return query select i.id from unnest(v_places, v_ids) i(place, id) where i.id is not null order by i.place;
end;
$body$, v_pass_on);
    else
      v_body := format($body$
begin
  %s
  %s;
end;
$body$,
        case v_call.name
          when 'create_task' then 'perform fairq_citus.check_caller(p_queue);'
          -- A call without a task has no node: this one answers, and raises what is wrong.
          when 'finish_tasks' then format('if p_ids[1] is null then return query select fairq_citus.finish_tasks(%s); return; end if;',
            (select string_agg(quote_ident(n), ', ') from unnest(v_call.names) n))
        end,
        case
          when v_call.result = 'void' then 'perform ' || v_pass_on
          when v_call.result like 'TABLE(%' then format('return query select * from jsonb_to_recordset(%s) f%s', v_pass_on, substring(v_call.result from 6))
          when v_call.is_row then format('return jsonb_populate_record(null::%s, %s -> 0)', v_call.result, v_pass_on)
          when v_call.is_set then format('return query select f.id::bigint from jsonb_array_elements_text(%s) f(id)', v_pass_on)
          else format('return (%s ->> 0)::%s', v_pass_on, v_call.result)
        end);
    end if;
    -- "or replace" keeps rights and dependencies. The settings make every session write arguments in the same form.
    execute format('create or replace function fairq.%I(%s) returns %s language plpgsql security definer set search_path = pg_catalog, pg_temp '
      'set datestyle = iso set intervalstyle = postgres set extra_float_digits = 1 as %L',
      v_call.name, v_call.arguments, v_call.result, v_body);
    execute format('comment on function fairq.%1$I is %2$L', v_call.name, 'Calls fairq_citus.' || v_call.name || ' on the node that has it.');
  end loop;
  -- The end of a task is not announced, either: a watcher is told whether it is live, as before, and looks again.
  delete from fairq.watches;
  create or replace function fairq.watch_task(p_id bigint, p_for interval default '1 minute') returns boolean
  language plpgsql security definer set search_path = pg_catalog, pg_temp as $watch$
begin
  perform fairq._check_length('the time to watch a task', coalesce(p_for, interval '0'), interval '1 hour');
  return (select r.live from fairq.task_result(p_id) r);
end;
$watch$;
  -- A turn ends only tasks of the node that the worker is connected to.
  execute replace(pg_get_functiondef('fairq.turn'::regproc), ' fairq.finish_tasks(', ' fairq_citus.finish_tasks(');
end;
$enter$;
