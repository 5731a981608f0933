create function fairq._refuse_queue(p_queue text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  if p_queue is null then
    raise exception 'no queue is named' using errcode = 'QF003', hint = 'For example: default. A null names none.';
  end if;
  raise exception 'there is no queue "%"', p_queue
    using errcode = 'QF003',
      hint = format('Create it with: select fairq.configure_queue(%L);', p_queue);
end;
$$;
comment on function fairq._refuse_queue(text) is 'Raises QF003: the queue is unknown.';
