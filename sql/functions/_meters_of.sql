create function fairq._meters_of(p_queue text) returns integer
language plpgsql
stable
set search_path = ''
as $$
begin
  return ((case when fairq._counts((fairq._lane(0, '#meters', 'queue ' || p_queue)).policy) then 1 else 0 end)
    + (case when fairq._counts((fairq._lane(0, '#meters', 'cluster')).policy) then 2 else 0 end))::integer;
end;
$$;
comment on function fairq._meters_of(text) is 'In which meters a task of this queue holds a place: 1 its queue, 2 the cluster.';
