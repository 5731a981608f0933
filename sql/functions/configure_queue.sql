-- Creates a queue, or changes its settings; null leaves one as it is.
-- Returns the settings in force.
-- Raises QF006 bad name, QF007 bad number, QF009 bad interval.
-- Locks: queues, one row.
create function fairq.configure_queue(
  p_queue text,
  p_ready_target integer default null,
  p_max_attempts integer default null,
  p_retry_base interval default null,
  p_retry_cap interval default null,
  p_retention interval default null,
  p_notify boolean default null
) returns fairq.queues
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_queue fairq.queues;
begin
  if p_queue is null or p_queue = '' or octet_length(p_queue) > 200 then
    raise exception 'the name of a queue has 1 to 200 bytes' using errcode = 'QF006', hint = 'For example: documents.';
  end if;
  if p_ready_target not between 1 and 1000000 or p_max_attempts not between 1 and 1000000 then
    raise exception 'a setting of queue "%" is out of range: ready target %, max attempts %', p_queue, p_ready_target, p_max_attempts
      using errcode = 'QF007', hint = 'Both are 1 to 1000000.';
  end if;
  if p_retry_base < interval '0' or p_retry_cap < interval '0' or p_retention < interval '0' then
    raise exception 'a time of queue "%" is negative: retry base %, retry cap %, retention %', p_queue, p_retry_base, p_retry_cap, p_retention
      using errcode = 'QF009', hint = 'Zero or more.';
  end if;

  insert into fairq.queues (queue) values (p_queue) on conflict do nothing;
  insert into fairq.domains (shard_no, queue)
  select s.shard_no, p_queue from fairq._shards(null) s(shard_no)
  on conflict do nothing;

  update fairq.queues q
  set ready_target = coalesce(p_ready_target, q.ready_target),
    max_attempts = coalesce(p_max_attempts, q.max_attempts),
    retry_base = coalesce(p_retry_base, q.retry_base),
    retry_cap = coalesce(p_retry_cap, q.retry_cap),
    retention = coalesce(p_retention, q.retention),
    notify = coalesce(p_notify, q.notify)
  where q.queue = p_queue
  returning q.* into v_queue;
  return v_queue;
end;
$$;
comment on function fairq.configure_queue(text, integer, integer, interval, interval, interval, boolean) is
  'Creates a queue, or changes its settings; null leaves one as it is.';
