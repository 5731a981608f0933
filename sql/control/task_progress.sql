-- What the handler of a running task reported last.
-- Returns no row when it has reported nothing, or when the task is not live, or in a queue of other roles.
-- Cost: one step in progress_pkey per shard.
create function fairq.task_progress(p_id bigint) returns table (attempt integer, done double precision, total double precision, note jsonb)
language sql stable rows 1 security definer set search_path = pg_catalog, pg_temp as $$
  select g.attempt, g.done, g.total, g.note from fairq.progress g
  where g.done is not null and g.shard_no = any(array(select n.shard_no from fairq._shards(null) n(shard_no)))
    and g.task_id = p_id
    -- A report of an ended task may be left, until it is swept.
    and exists (select from fairq.tasks t where t.shard_no = g.shard_no and t.id = p_id and fairq._may_ask(t.queue))
  order by g.reported_at desc limit 1
$$;
comment on function fairq.task_progress is 'What the handler of a running task reported last.';
