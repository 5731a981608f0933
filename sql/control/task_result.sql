-- How a task ended, or whether it is still live. Returns one row; for an unknown id, and for a task in a queue of other roles, it has nulls and false. A task
-- that ends meanwhile is seen as either live or ended: everything is read in one snapshot, the caller's.
-- Cost: per shard one step in tasks_pkey, and one in each day of the history.
create function fairq.task_result(p_id bigint)
returns table (outcome text, finished_at timestamptz, result jsonb, error jsonb, live boolean)
language sql stable rows 1 security definer set search_path = pg_catalog, pg_temp as $$
  select f.outcome, f.finished_at, f.result, f.error,
    exists (select from fairq.tasks t where t.shard_no = any(s.shard_nos) and t.id = p_id and fairq._may_ask(t.queue))
  from (select array(select n.shard_no from fairq._shards(null) n(shard_no))) s(shard_nos)
  left join lateral (
    select k.outcome, k.finished_at, k.result, k.error from fairq.finished_tasks k
    where k.shard_no = any(s.shard_nos) and k.id = p_id and fairq._may_ask(k.queue)
    order by k.finished_at desc limit 1
  ) f on true
$$;
comment on function fairq.task_result is 'How a task ended, or whether it is still live.';
