-- finish_tasks in one shard. A task leaves with one delete, whose conditions are the fencing token; history, attempts and rings come from what it returned.
-- Who finishes a task that recovery takes at the same moment waits for that row, then finds another worker in it, and gets nothing.
-- The tasks are looked up by id, one by one, then _leave takes them by ctid and looks at the fencing token again. A row that moved in between,
-- because configure_group or configure_queue began to count it, is still this worker's: it is looked up once more.
create function fairq._finish(
  p_shard_no integer,
  p_worker_id bigint,
  p_ids bigint[],
  p_attempts integer[],
  p_outcomes text[],
  p_results jsonb[],
  p_errors jsonb[],
  p_retry_delays interval[]
) returns setof bigint
language plpgsql
volatile
rows 100
set search_path = ''
as $$
declare
  v_now timestamptz := fairq._now();
  v_held record;
  v_left integer;
begin
  -- Nearly always nobody waits, and this look into an index is all.
  if exists (select from fairq.watches w where w.shard_no = p_shard_no and w.until > v_now) then
    perform fairq._tell_watchers(p_shard_no, p_ids, v_now);
  end if;
  loop
    select array_agg(h.ctid) as ctids, array_agg(i.attempt) as attempts, array_agg(h.outcome) as outcomes, array_agg(i.result) as results,
      array_agg(i.error) as errors, array_agg(h.run_at) as run_ats, array_agg(h.counted) as counted, array_agg(h.meters) as meters, array_agg(h.started_at) as started_ats
    into v_held
    from unnest(p_ids, p_attempts, p_outcomes, p_results, p_errors, p_retry_delays) as i(id, attempt, outcome, result, error, retry_delay)
    cross join lateral (
      -- "offset 0" keeps this a look-up of one id: a join could become a walk through all tasks of the shard.
      select t.ctid, t.counted, t.meters, t.started_at,
        -- No attempt is left, or the next one would come after the deadline.
        case when i.outcome = 'retry' and (t.attempt >= t.max_attempts or r.run_at >= t.expires_at) then 'failed' else coalesce(i.outcome, 'succeeded') end
          as outcome,
        r.run_at
      from fairq.tasks t
      cross join lateral (
        select case
          when i.outcome = 'retry' then v_now + coalesce(i.retry_delay, (
            select fairq._backoff(q.retry_base, q.retry_cap, t.attempt) from fairq.queues q where q.queue = t.queue
          ))
        end as run_at
        offset 0
      ) r
      where t.shard_no = p_shard_no
        and t.id = i.id
        and t.attempt = i.attempt
        and t.worker_id is not distinct from p_worker_id
        and t.started_at is not null
      offset 0
    ) h;

    exit when v_held.ctids is null;
    return query
      select l.* from fairq._leave(p_shard_no, p_worker_id, v_held.ctids, v_held.attempts, v_held.outcomes, v_held.results, v_held.errors,
        v_held.run_ats, v_held.counted, v_held.meters, v_held.started_ats, v_now) l;
    get diagnostics v_left = row_count;
    if 'retry' = any(v_held.outcomes) then
      perform fairq._ring_wishes(p_shard_no, p_ids);
    end if;
    exit when v_left = cardinality(v_held.ctids);
  end loop;
end;
$$;
comment on function fairq._finish(integer, bigint, bigint[], integer[], text[], jsonb[], jsonb[], interval[]) is 'Ends attempts in one shard.';
