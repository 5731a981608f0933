-- What p_reset may name depends on what is configured: a name that means nothing there is refused, or a misspelt reset would look like one that worked.
-- Raises QF014 an unknown name to reset.
create function fairq._check_reset(p_of text, p_reset text[], p_known text[]) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if not p_reset <@ p_known then
    raise exception 'p_reset of % names something that cannot be reset there: %', p_of, p_reset
      using errcode = 'QF014', hint = format('There are: %s.', array_to_string(p_known, ', '));
  end if;
end;
$$;
comment on function fairq._check_reset(text, text[], text[]) is 'Raises QF014 for a name in p_reset that means nothing there.';
