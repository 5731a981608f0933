-- Announces the ends of those of these tasks that somebody watches; where nobody does, no NOTIFY, which takes a database-wide lock at commit.
-- The callers have settings of their own for their plans; this one has its own, too.
-- Cost: the watches that have not run out, never those behind them.
create function fairq._tell_watchers(p_shard_no integer, p_ids bigint[], p_now timestamptz) returns void
language plpgsql
volatile
set search_path = ''
set plan_cache_mode = 'force_generic_plan'
set enable_seqscan = off
set enable_bitmapscan = off
set enable_indexscan = on
as $$
declare
  v_watched bigint[];
begin
  select array_agg(distinct w.task_id) into v_watched
  from fairq.watches w
  where w.shard_no = p_shard_no
    and w.until > p_now
    and w.task_id = any(p_ids);
  if v_watched is not null then
    -- A notice has its limits: of many it names none, and everybody looks.
    perform pg_notify('fairq_done', case when cardinality(v_watched) <= 200 then array_to_string(v_watched, ',') else '' end);
  end if;
end;
$$;
comment on function fairq._tell_watchers(integer, bigint[], timestamptz) is 'Announces the ends of tasks that somebody watches.';
