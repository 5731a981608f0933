-- Takes the places of tasks just popped. The caller holds #meters since it asked.
create function fairq._charge_meters(p_queue text, p_popped integer, p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
as $$
begin
  perform fairq._take_place(0, '#meters', 'queue ' || p_queue, p_now, p_popped);
  perform fairq._take_place(0, '#meters', 'cluster', p_now, p_popped);
end;
$$;
comment on function fairq._charge_meters(text, integer, timestamptz) is 'Charges tasks just popped to the meters.';
