create function fairq._check_limit(p_limit integer) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if p_limit is null or p_limit < 1 or p_limit > 100000 then
    raise exception 'the limit % is out of range', coalesce(p_limit::text, 'null')
      using errcode = 'QF007', hint = 'Ask for 1 to 100000 tasks.';
  end if;
end;
$$;
comment on function fairq._check_limit(integer) is 'Raises QF007 when a limit is not 1 to 100000.';
