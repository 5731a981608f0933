-- How far running tasks are, as their handlers say, and what they have used so far. A newer report of a task replaces the one before.
-- Returns the ids that were accepted. A missing one was not this worker's any more.
-- Raises QF011 arrays of different length, QF008 bad cost. Locks: progress, the tasks' own rows.
-- Cost: one step in held_pkey and one in progress_pkey per task.
create function fairq.report_progress(
  p_worker_id bigint, p_ids bigint[], p_attempts integer[], p_done double precision[], p_totals double precision[] default null,
  p_notes jsonb[] default null, p_costs double precision[] default null, p_shard_no integer default null
) returns setof bigint
language plpgsql security definer rows 100 set search_path = pg_catalog, pg_temp
set plan_cache_mode = 'force_generic_plan' set jit = 'off' set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_now timestamptz := fairq._now();
  v_shard_no integer;
begin
  perform fairq._check_lengths(array[coalesce(cardinality(p_ids), 0), coalesce(cardinality(p_attempts), 0)]);
  perform fairq._check_costs(p_worker_id, p_costs);
  if p_worker_id is null then return; end if;
  for v_shard_no in select s.shard_no from fairq._shards(p_shard_no) s(shard_no) loop
    perform fairq._check_worker(v_shard_no, p_worker_id);
    return query
      with held as materialized (
        select t.id, i.attempt, i.done, i.total, i.note, i.cost, l.reported_at as previous
        from unnest(p_ids, p_attempts, p_done, p_totals, p_notes, p_costs) as i(id, attempt, done, total, note, cost)
        cross join lateral (
          select k.id from fairq.held k
          where k.shard_no = v_shard_no and k.id = i.id and k.attempt = i.attempt and k.worker_id = p_worker_id
          offset 0
        ) t
        left join lateral (
          select g.reported_at from fairq.progress g
          where g.shard_no = v_shard_no and g.task_id = t.id
          order by g.reported_at desc limit 1
        ) l on true
      ),
      reported as (
        insert into fairq.progress (shard_no, task_id, reported_at, attempt, done, total, note, used)
        select v_shard_no, h.id, v_now, h.attempt, h.done, h.total, h.note, h.cost from held h
        on conflict do nothing
      ),
      replaced as (
        delete from fairq.progress g
        using held h
        where g.shard_no = v_shard_no and g.task_id = h.id and g.reported_at = h.previous
          and h.previous < v_now
      )
      select h.id from held h;
  end loop;
end;
$$;
comment on function fairq.report_progress is 'Reports the progress of running tasks. Returns the ids accepted.';
