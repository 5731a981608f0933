-- The lane of a group as it is: the newest version, one step in lanes_pkey. All null when there is none.
create function fairq._lane(p_shard_no integer, p_queue text, p_group_key text) returns fairq.lanes
language plpgsql
stable
set search_path = ''
as $$
declare
  v_lane fairq.lanes;
begin
  select l.* into v_lane
  from fairq.lanes l
  where l.shard_no = p_shard_no
    and l.queue = p_queue
    and l.group_key = p_group_key
  order by l.version desc
  limit 1;
  return v_lane;
end;
$$;
comment on function fairq._lane(integer, text, text) is 'The lane of a group, newest version.';
