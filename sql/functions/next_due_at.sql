-- When a queue has to be looked at again although nothing rings: a scheduled task becomes due, a rate or a breaker lets the next one pass. For workers that sleep.
-- Returns null when there is no such time.
create function fairq.next_due_at(p_queue text) returns timestamptz
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_next timestamptz;
begin
  select min(k.next_due_at) into v_next
  from fairq._shards(null) s(shard_no)
  cross join lateral fairq._tick(s.shard_no, p_queue) k;
  return v_next;
end;
$$;
comment on function fairq.next_due_at(text) is 'When a sleeping worker should look at a queue again, at the latest.';
