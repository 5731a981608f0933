create function fairq._refuse_draining(p_queue text) returns void
language plpgsql
stable
set search_path = ''
as $$
begin
  raise exception 'queue "%" is draining and takes no new tasks', p_queue
    using errcode = 'QF016',
      hint = format('It takes them again after: select fairq.resume_queue(%L);', p_queue);
end;
$$;
comment on function fairq._refuse_draining(text) is 'Raises QF016: the queue is draining.';
