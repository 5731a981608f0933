-- Creates many tasks with one call. Each array has one element per task; the other options hold for all tasks.
-- It writes one ring per group, user and priority, not one per task.
-- Returns the ids in the order of the input.
-- Raises what create_task raises, and QF011 when the arrays differ in length. Then nothing is created.
create function fairq.create_tasks(
  p_group_keys text[], p_payloads jsonb[], p_queue text default 'default', p_kind text default 'default', p_priority integer default null,
  p_run_at timestamptz default null, p_expires_at timestamptz default null, p_max_attempts integer default null, p_cost double precision default null,
  p_timeout interval default null, p_idempotency_keys text[] default null, p_concurrency_keys text[] default null, p_headers jsonb default null,
  p_priorities integer[] default null, p_costs double precision[] default null, p_user_keys text[] default null
) returns setof bigint
language plpgsql security definer set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_settings record;
  v_count integer := coalesce(cardinality(p_group_keys), 0);
  v_announce boolean;
begin
  select o.* into v_settings from fairq._options(p_queue, p_kind, p_max_attempts, p_priority, p_cost, p_timeout) o;
  if not found then perform fairq._queue(p_queue); end if;
  if v_settings.enqueue_role is not null then
    perform fairq._check_role(p_queue, v_settings.enqueue_role);
  end if;
  -- With idempotency keys create_task decides for each task: one whose key is known is not new.
  if v_settings.draining_at is not null and p_idempotency_keys is null then
    perform fairq._refuse_draining(p_queue);
  end if;
  perform fairq._check_lengths(array[v_count, coalesce(cardinality(p_payloads), 0), cardinality(p_idempotency_keys), cardinality(p_concurrency_keys),
    cardinality(p_priorities), cardinality(p_costs), cardinality(p_user_keys)]);

  -- With several shards no single ring tells whether a NOTIFY is under way, so one is always sent.
  v_announce := v_settings.notify and v_count > 0;
  if v_announce and v_settings.shard_count = 1 and v_settings.moving_from is null then
    select not a.is_announced into v_announce from fairq._announced(0, p_queue) a;
  end if;

  -- Keys are taken one by one in a fixed order: two calls with the same keys wait for each other and do not deadlock.
  if p_idempotency_keys is not null then
    return query
      with created as materialized (
        select k.ordinal, fairq.create_task(k.group_key, k.payload, p_queue, p_kind, coalesce(k.priority, p_priority), p_run_at, p_expires_at,
          p_max_attempts, coalesce(k.cost, p_cost), p_timeout, k.idempotency_key, k.concurrency_key, p_headers, k.user_key) as id
        from (
          select i.*
          from unnest(p_group_keys, p_payloads, p_idempotency_keys, p_concurrency_keys, p_priorities, p_costs, p_user_keys)
            with ordinality i(group_key, payload, idempotency_key, concurrency_key, priority, cost, user_key, ordinal)
          order by i.idempotency_key, i.group_key, i.ordinal
        ) k
      )
      select c.id from created c order by c.ordinal;
  else
    return query
      with input as materialized (
        select
          -- The first task is always checked, for the options that hold for all; the others only if something about them is odd.
          case
            when i.ordinal = 1 or fairq._is_odd(i.group_key, i.payload, v_settings.payload_limit, coalesce(i.priority, v_settings.priority),
              coalesce(i.cost, v_settings.cost), null, i.concurrency_key, i.user_key)
              then fairq._check_task(i.group_key, i.payload, v_settings.payload_limit, p_kind, coalesce(i.priority, v_settings.priority), p_run_at, p_expires_at,
                p_max_attempts, coalesce(i.cost, v_settings.cost), p_timeout, null, i.concurrency_key, p_headers, i.user_key)
          end as checked,
          i.*, coalesce(i.priority, v_settings.priority) as task_priority, nextval('fairq.task_ids') as id,
          case when v_settings.moving_from is null then fairq._shard_of(i.group_key, v_settings.shard_count) else fairq._home(i.group_key) end as shard_no
        from unnest(p_group_keys, p_payloads, p_concurrency_keys, p_priorities, p_costs, p_user_keys)
          with ordinality i(group_key, payload, concurrency_key, priority, cost, user_key, ordinal)
      ),
      created as (
        insert into fairq.tasks (shard_no, id, sequence, queue, group_key, user_key, kind, priority, created_at, run_at, expires_at, cost,
          max_attempts, timeout, concurrency_key, scheduled, headers, payload)
        select i.shard_no, i.id, i.id, p_queue, i.group_key, coalesce(i.user_key, ''), p_kind,
          i.task_priority, v_now, p_run_at, p_expires_at, coalesce(i.cost, v_settings.cost),
          v_settings.max_attempts, v_settings.timeout, i.concurrency_key, coalesce(p_run_at > v_now, false), p_headers, i.payload
        from input i
      ),
      rung as (
        insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, keyed, announced)
        select i.shard_no, p_queue, i.group_key, i.user_key, i.task_priority, min(i.id), bool_or(i.concurrency_key is not null),
          v_announce and bool_or(i.ordinal = 1)
        from input i
        where p_run_at is null or p_run_at <= v_now
        group by i.shard_no, i.group_key, i.user_key, i.task_priority
      ),
      announced as (
        insert into fairq.rings (shard_no, queue, group_key, due_at, announced)
        select i.shard_no, p_queue, min(i.group_key), p_run_at, v_announce and bool_or(i.ordinal = 1)
        from input i
        where p_run_at > v_now
        group by i.shard_no
      )
      select i.id from input i order by i.ordinal;
  end if;

  if v_announce then perform pg_notify('fairq', p_queue); end if;
end;
$$;
comment on function fairq.create_tasks is 'Creates many tasks with one call. Returns their ids in the order of the input.';
