-- Takes the lock that makes promotion one at a time, until the end of the transaction.
-- Returns false when another session holds it and p_wait is false.
-- The snapshot of the caller's next statement is taken after the lock, so it sees all that the previous promotion wrote:
-- this is why promotion insists on READ COMMITTED.
-- Raises QF005 in another isolation level, QF003 when the queue is unknown.
-- Locks: domains, one row.
create function fairq._lock_domain(p_shard_no integer, p_queue text, p_wait boolean) returns boolean
language plpgsql
volatile
set search_path = ''
as $$
begin
  perform fairq._check_isolation(p_queue);
  if p_wait then
    perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update;
  else
    perform from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue for update skip locked;
  end if;
  if found then
    return true;
  end if;

  if not exists (select from fairq.domains d where d.shard_no = p_shard_no and d.queue = p_queue) then
    perform fairq._refuse_queue(p_queue);
  end if;
  return false;
end;
$$;
comment on function fairq._lock_domain(integer, text, boolean) is 'Takes the lock of a domain; false when it is taken.';
