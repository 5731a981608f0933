-- Promotes a queue, in all its shards: hears new rings and refills the ready set if it is short. pop_tasks does this by itself when it has to.
-- Returns the number of tasks that became queued.
-- Raises QF003 unknown queue, QF005 not READ COMMITTED, QF007 bad limit.
-- Locks: the domain, waits for it (see 030_tables.sql); held until the transaction ends.
create function fairq.promote_overflow(p_queue text default 'default', p_limit integer default null, p_shard_no integer default null)
returns integer
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set jit = 'off'
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_queue fairq.queues;
  v_shard_no integer;
  v_promoted integer := 0;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  if not found then
    perform fairq._refuse_queue(p_queue);
  end if;
  if p_limit is not null then
    perform fairq._check_limit(p_limit);
  end if;

  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    v_promoted := v_promoted
      + fairq._promote(v_shard_no, p_queue, coalesce(p_limit, fairq._ready_target(v_shard_no, v_queue)), true);
  end loop;
  return v_promoted;
end;
$$;
comment on function fairq.promote_overflow(text, integer, integer) is
  'Hears new rings and moves waiting tasks into the served order. pop_tasks does this when it has to.';
