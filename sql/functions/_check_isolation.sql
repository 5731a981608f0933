-- Promotion and pop have to see what others committed a moment ago.
-- Raises QF005 in REPEATABLE READ and SERIALIZABLE.
create function fairq._check_isolation(p_queue text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  if current_setting('transaction_isolation') not in ('read committed', 'read uncommitted') then
    raise exception 'queue "%" is promoted and popped in READ COMMITTED, this transaction is %', p_queue, upper(current_setting('transaction_isolation'))
      using errcode = 'QF005',
        hint = 'Call it in a transaction of its own. Creating and cancelling tasks work in every isolation level.';
  end if;
end;
$$;
comment on function fairq._check_isolation(text) is 'Raises QF005 when the transaction is not READ COMMITTED.';
