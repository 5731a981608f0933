-- Raises QF007 when a number is not from p_least to p_most.
create function fairq._check_limit(p_limit integer, p_of text default 'the limit', p_least integer default 1, p_most integer default 100000)
returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_limit is null or p_limit < p_least or p_limit > p_most then
    raise exception '% of % is out of range', p_of, coalesce(p_limit::text, 'null')
      using errcode = 'QF007', hint = format('A number from %s to %s.', p_least, p_most);
  end if;
end;
$$;

-- Promotion and pop have to see what others committed a moment ago.
-- Raises QF005 in REPEATABLE READ and SERIALIZABLE.
create function fairq._check_isolation(p_what text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception '"%" needs READ COMMITTED, this transaction is %', coalesce(left(p_what, 200), 'null'), upper(current_setting('transaction_isolation'))
      using errcode = 'QF005',
        hint = 'Call it in a READ COMMITTED transaction of its own. Creating and cancelling tasks work in every isolation level.';
  end if;
end;
$$;

-- The shard that is named, or all shards; while groups move, the old and the new ones.
create function fairq._shards(p_shard_no integer) returns setof integer
language sql stable rows 1 as $$
  select generate_series(coalesce(p_shard_no, 0), coalesce(p_shard_no, greatest(s.shard_count, s.moving_from) - 1))
  from fairq.settings s
$$;

-- Takes the lock that makes promotion one at a time, until the end of the transaction.
-- Returns false when another session holds it and p_wait is false.
-- Promotion insists on READ COMMITTED so that the snapshot of the caller's next statement is taken after the lock, and sees all that the previous promotion
-- wrote.
-- Raises QF005 in another isolation level, QF003 when the queue is unknown. Locks: domains, one row.
create function fairq._lock_domain(p_shard_no integer, p_queue text, p_wait boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._check_isolation(p_queue);
  if p_wait then
    perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  else
    perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update skip locked;
  end if;
  if found then return true; end if;

  if not exists (select from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue) then
    perform fairq._queue(p_queue);
  end if;
  return false;
end;
$$;

-- Waits for the lock of a domain, and takes it, but waits no longer than a promotion takes: a transaction that promoted and stays open must not keep every
-- pop waiting.
-- Returns whether it got the lock. Locks: the domain, until the transaction ends.
create function fairq._await_domain(p_shard_no integer, p_queue text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp set lock_timeout = '200ms' as $$
begin
  perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  return true;
exception when lock_not_available or deadlock_detected then
  return false;
end;
$$;

-- A queue with its settings.
-- Raises QF003 when it is unknown.
create function fairq._queue(p_queue text) returns fairq.queues
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
declare
  v_queue fairq.queues;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_queue and not q.internal;
  if not found then
    raise exception '%', coalesce('there is no queue "' || left(p_queue, 200) || '"', 'no queue is named')
      using errcode = 'QF003',
        hint = coalesce('Create it with: select fairq.configure_queue(' || quote_literal(left(p_queue, 200)) || ');', 'Name one, for example: default.');
  end if;
  return v_queue;
end;
$$;

-- Raises QF016: the queue is draining.
create function fairq._refuse_draining(p_queue text) returns void
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  raise exception 'queue "%" is draining and takes no new tasks', p_queue
    using errcode = 'QF016',
      hint = format('To accept tasks again: select fairq.resume_queue(%L);', p_queue);
end;
$$;

-- Raises p_code when a text is not a name: null, empty, or longer than p_most bytes.
create function fairq._check_name(p_what text, p_name text, p_most integer, p_code text, p_hint text) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_name is null or p_name = '' or octet_length(p_name) > p_most then
    raise exception '% is %', p_what, case when p_name is null then 'null' when p_name = '' then 'empty' else 'too long' end
      using errcode = p_code, hint = format('%s: a text of 1 to %s bytes.', p_hint, p_most);
  end if;
end;
$$;

-- The shard of a group. Raises QF001 bad group key, QF003 unknown queue, QF006 bad user key.
create function fairq._group_shard(p_queue text, p_group_key text, p_user_key text default null) returns integer
language plpgsql stable set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._check_name('the group key', p_group_key, 500, 'QF001', 'Name the tenant');
  if p_user_key is not null then
    perform fairq._check_name(format('the user key of group "%s"', p_group_key), p_user_key, 500, 'QF006', 'Name one of the users of the group');
  end if;
  perform fairq._queue(p_queue);
  return fairq._home(p_group_key);
end;
$$;

-- Locks the domain of a group, and returns its shard. While this waits for the lock, the group may move; then it tries the new shard.
create function fairq._lock_group(p_queue text, p_group_key text) returns integer
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_shard_no integer;
begin
  loop
    v_shard_no := fairq._home(p_group_key);
    perform fairq._lock_domain(v_shard_no, p_queue, true);
    exit when v_shard_no = fairq._home(p_group_key);
  end loop;
  return v_shard_no;
end;
$$;

-- Raises QF011 when any array has another length than the first. The length of a null array is null, and fits.
create function fairq._check_lengths(p_lengths integer[]) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_lengths[1] <> any(p_lengths) then
    raise exception 'the arrays have different lengths: %', array_to_string(p_lengths, ', ')
      using errcode = 'QF011', hint = 'Every array has one element per task; one that has a default may be null.';
  end if;
end;
$$;

-- Raises QF008 when a cost is not from 0 to 1000000000.
create function fairq._check_costs(p_worker_id bigint, p_costs double precision[]) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
declare
  v_cost double precision;
begin
  if p_costs is null then return; end if;
  -- NaN sorts above all numbers, so this finds it, too.
  select c.cost into v_cost from unnest(p_costs) c(cost) where not c.cost between 0 and 1000000000 limit 1;
  if found then
    raise exception 'worker % charges % for an attempt', coalesce(p_worker_id::text, 'null'), v_cost
      using errcode = 'QF008', hint = 'What an attempt used: 0 to 1000000000, in the unit of the queue''s choice; null where it did not say.';
  end if;
end;
$$;

-- Takes the lock of counters: of the concurrency keys, which all queues of the shard share, or of a meter. It is held while places are taken. A pop waits for
-- it only a moment: a pop that holds keys may wait for one that holds the meters, and whoever ends tasks must not wait behind a pop that hangs.
create function fairq._lock_counters(p_shard_no integer, p_queue text, p_wait boolean) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  return fairq._lock_domain(p_shard_no, p_queue, p_wait) or (not p_wait and fairq._await_domain(p_shard_no, p_queue));
end;
$$;

-- Raises QF009 when a length of time is not positive, or too long: an infinite or absurd one, once stored, would make other functions fail.
create function fairq._check_length(p_what text, p_length interval, p_most interval) returns void
language plpgsql immutable set search_path = pg_catalog, pg_temp as $$
begin
  if p_length <= interval '0' or not fairq._is_span(p_length, p_most) then
    raise exception '% of % is out of range', p_what, p_length
      using errcode = 'QF009', hint = format('More than 0, at most %s.', p_most);
  end if;
end;
$$;
