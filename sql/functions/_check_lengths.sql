create function fairq._check_lengths(p_worker_id bigint, p_ids bigint[], p_attempts integer[]) returns void
language plpgsql
immutable
set search_path = ''
as $$
begin
  if coalesce(cardinality(p_ids), 0) <> coalesce(cardinality(p_attempts), 0) then
    raise exception 'worker % names % tasks and % attempts', p_worker_id, coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)
      using errcode = 'QF011', hint = 'Both arrays have one element per task.';
  end if;
end;
$$;
comment on function fairq._check_lengths(bigint, bigint[], integer[]) is 'Raises QF011 when ids and attempts do not pair.';
