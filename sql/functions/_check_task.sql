-- What is wrong with a task, said clearly, before anything is written.
-- Raises QF001 group key, QF002 payload, QF006 other keys, QF008 cost, QF009 times, QF007 attempts.
create function fairq._check_task(
  p_group_key text,
  p_payload jsonb,
  p_payload_limit integer,
  p_kind text,
  p_priority integer,
  p_run_at timestamptz,
  p_expires_at timestamptz,
  p_max_attempts integer,
  p_cost double precision,
  p_timeout interval,
  p_idempotency_key text,
  p_concurrency_key text
) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_group_key is null or p_group_key = '' or octet_length(p_group_key) > 500 then
    raise exception 'the group key is %', case when p_group_key is null then 'null' when p_group_key = '' then 'empty' else 'too long' end
      using errcode = 'QF001', hint = 'Name the tenant the task belongs to: a text of 1 to 500 bytes.';
  end if;
  if p_payload is null then
    raise exception 'the payload of a task of group "%" is null', p_group_key
      using errcode = 'QF002', hint = 'Pass ''{}'' or ''null''::jsonb for a task without data.';
  end if;
  -- The binary form is rarely smaller than half the text, so the text is only made for payloads that come near the limit.
  if pg_column_size(p_payload) > p_payload_limit / 4 and octet_length(p_payload::text) > p_payload_limit then
    raise exception 'the payload of a task of group "%" has % bytes, % are allowed', p_group_key, octet_length(p_payload::text), p_payload_limit
      using errcode = 'QF002', hint = 'Store the data elsewhere and pass a reference, or raise the limit: select fairq.configure_cluster(p_payload_limit => ...);';
  end if;
  if p_kind is null or p_kind = '' or octet_length(p_kind) > 200 then
    raise exception 'the kind of a task of group "%" is %', p_group_key, coalesce('"' || left(p_kind, 40) || '"', 'null')
      using errcode = 'QF006', hint = 'Name the handler: a text of 1 to 200 bytes.';
  end if;
  if p_idempotency_key = '' or octet_length(p_idempotency_key) > 500 or p_concurrency_key = '' or octet_length(p_concurrency_key) > 500 then
    raise exception 'the idempotency or concurrency key of a task of group "%" is empty or too long', p_group_key
      using errcode = 'QF006', hint = 'Keys have 1 to 500 bytes; null means none.';
  end if;
  if p_priority is null or p_priority not between -1000000 and 1000000 then
    raise exception 'the priority % of a task of group "%" is out of range', coalesce(p_priority::text, 'null'), p_group_key
      using errcode = 'QF007', hint = 'Higher runs first; the range is -1000000 to 1000000, the default 0.';
  end if;
  if p_max_attempts is not null and p_max_attempts not between 1 and 1000000 then
    raise exception 'max_attempts % of a task of group "%" is out of range', p_max_attempts, p_group_key
      using errcode = 'QF007', hint = 'At least 1; null takes the queue''s default.';
  end if;
  if p_cost is null or not (p_cost >= 0.001 and p_cost <= 1000000) or p_cost = 'NaN' then
    raise exception 'the cost % of a task of group "%" is out of range', coalesce(p_cost::text, 'null'), p_group_key
      using errcode = 'QF008', hint = 'The cost is relative to an ordinary task of cost 1: 0.001 to 1000000.';
  end if;
  if not isfinite(p_run_at) or not isfinite(p_expires_at) then
    raise exception 'run_at or expires_at of a task of group "%" is infinite', p_group_key
      using errcode = 'QF009', hint = 'Leave it null instead.';
  end if;
  -- Workers keep a length of time in types that end somewhere: one task that none of them can read would stop them all.
  if p_timeout is not null and (p_timeout <= interval '0' or p_timeout > interval '1000000000 seconds') then
    raise exception 'the timeout % of a task of group "%" is out of range', p_timeout, p_group_key
      using errcode = 'QF009', hint = 'More than 0, at most 1000000000 seconds; null for no limit.';
  end if;
end;
$$;
comment on function fairq._check_task(text, jsonb, integer, text, integer, timestamptz, timestamptz, integer, double precision, interval, text, text) is
  'Raises an error of class QF for a task that cannot be created.';
