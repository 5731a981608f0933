create function fairq._check_group(p_queue text, p_group_key text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  if p_group_key is null or p_group_key = '' or octet_length(p_group_key) > 500 then
    raise exception 'the group key is %', case when p_group_key is null then 'null' when p_group_key = '' then 'empty' else 'too long' end
      using errcode = 'QF001', hint = 'Name the tenant: a text of 1 to 500 bytes.';
  end if;
  if not exists (select from fairq.queues q where q.queue = p_queue and not q.internal) then
    perform fairq._refuse_queue(p_queue);
  end if;
end;
$$;
comment on function fairq._check_group(text, text) is 'Raises QF001 or QF003 when a group cannot be meant.';
