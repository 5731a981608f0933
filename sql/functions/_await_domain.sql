-- Waits for the lock of a domain, and takes it, but not for longer than somebody who promotes would hold it: a transaction that promoted and stays open must
-- not keep every pop waiting.
-- Returns whether it got the lock.
-- Locks: the domain, until the transaction ends.
create function fairq._await_domain(p_shard_no integer, p_queue text) returns boolean
language plpgsql
volatile
set search_path = ''
set lock_timeout = '200ms'
as $$
begin
  perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  return true;
exception when lock_not_available or deadlock_detected then
  return false;
end;
$$;
comment on function fairq._await_domain(integer, text) is 'Waits for the lock of a domain for a moment.';
