-- The role that calls. Public functions run with the rights of the owner, so it is not current_user: it is the role that the session has SET, else its login.
-- Stable, without "set search_path": inlined into the statement that asks.
create function fairq._caller() returns text
language sql stable as $$ select coalesce(nullif(current_setting('role'), 'none'), session_user) $$;

-- Whether the caller has the rights of a role. Operators (fairq_admin) have the rights of every role, also of one that no longer exists.
create function fairq._has_role(p_role text, p_caller text default fairq._caller()) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
  select exists (
    select from pg_catalog.pg_roles r
    where r.rolname in (p_role, 'fairq_admin')
      and pg_has_role(p_caller, r.oid, 'usage'))
$$;

-- Raises 42501: the queue is for the members of another role.
create function fairq._check_role(p_queue text, p_role text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if not fairq._has_role(p_role) then
    raise exception 'permission denied for queue "%": it is for members of role "%"', p_queue, p_role
      using errcode = '42501', hint = format('Let an operator decide: grant %I to %I;', p_role, fairq._caller());
  end if;
end;
$$;

-- Whether the caller may ask about tasks of a queue, and cancel them: whoever may enqueue or work there.
create function fairq._may_ask(p_queue text) returns boolean
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_queue record;
begin
  select q.enqueue_role, q.work_role into v_queue from fairq.queues q where q.queue = p_queue;
  return v_queue.enqueue_role is null or fairq._has_role(v_queue.enqueue_role) or (v_queue.work_role is not null and fairq._has_role(v_queue.work_role));
end;
$$;

-- Whether the caller may plan schedules of a queue: whoever may ask about its tasks, and anybody where the queue has no work_role.
create function fairq._may_plan(p_queue text) returns boolean
language sql stable set search_path = pg_catalog, pg_temp as $$
  select fairq._may_ask(p_queue) or exists (select from fairq.queues q where q.queue = p_queue and q.work_role is null)
$$;

-- Only the role that registered a worker, or one with its rights, may call for it: ids of workers are numbers that anybody can guess. An unknown worker passes:
-- the calling function notices, because such a worker has no tasks.
-- Raises 42501.
create function fairq._check_worker(p_shard_no integer, p_worker_id bigint, p_caller text default fairq._caller()) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_role text;
begin
  select w.registered_by into v_role from fairq.workers w where w.shard_no = p_shard_no and w.worker_id = p_worker_id;
  if v_role <> p_caller and not fairq._has_role(v_role, p_caller) then
    raise exception 'permission denied for worker %: role "%" registered it', p_worker_id, v_role
      using errcode = '42501', hint = format('Connect as that role, or: set role %I;', v_role);
  end if;
end;
$$;
