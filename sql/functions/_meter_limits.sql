-- The limits of a whole queue ('queue NAME') or of the cluster as they are now; all null when there are none. Volatile, so that it sees what configure_queue
-- or configure_cluster wrote in the same statement.
create function fairq._meter_limits(p_scope text) returns fairq.groups
language sql
volatile
set search_path = ''
as $$
  select g.*
  from (values (1)) one
  left join fairq.groups g on g.shard_no = 0 and g.queue = '#meters' and g.group_key = p_scope
$$;
comment on function fairq._meter_limits(text) is 'The limits of a whole queue or of the cluster.';
