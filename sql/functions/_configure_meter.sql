-- Limits of a whole queue ('queue NAME') or of the cluster, kept as a group of #meters. A first cap or breaker counts the tasks that are held already; those being
-- popped at this very moment escape it.
-- Locks: the domain #meters, waits for it; groups, one row; held tasks with "skip locked".
create function fairq._configure_meter(
  p_scope text,
  p_queue text,
  p_max_running integer,
  p_rate_limit integer,
  p_rate_period interval,
  p_rate_burst integer,
  p_breaker_threshold integer,
  p_breaker_cooldown interval,
  p_reset text[]
) returns void
language plpgsql
volatile
set search_path = ''
as $$
declare
  v_meter fairq.groups;
  v_counts boolean;
  v_bit integer := case when p_scope = 'cluster' then 2 else 1 end;
  v_adopted integer;
begin
  perform fairq._promote(0, '#meters', 1, true);
  v_meter := fairq._set_limits(0, '#meters', p_scope, null, p_max_running, p_rate_limit, p_rate_period, p_rate_burst, p_breaker_threshold,
    p_breaker_cooldown, p_reset);
  v_counts := coalesce(v_meter.max_running, v_meter.breaker_threshold) is not null;

  with held as materialized (
    select t.ctid, t.shard_no
    from fairq._shards(null) s(shard_no)
    join fairq.tasks t on t.shard_no = s.shard_no
    where t.worker_id is not null
      and (p_queue is null or t.queue = p_queue)
      and (t.meters & v_bit <> 0) <> v_counts
    for update of t skip locked
  ),
  changed as (
    update fairq.tasks t
    set meters = case when v_counts then t.meters | v_bit else t.meters & ~v_bit end
    from held h
    where t.shard_no = h.shard_no
      and t.ctid = h.ctid
    returning t.id
  )
  select count(*)::integer into v_adopted from changed;
  if v_adopted > 0 then
    insert into fairq.rings (shard_no, queue, group_key, freed)
    values (0, '#meters', p_scope, case when v_counts then -v_adopted else v_adopted end);
  end if;
  perform fairq._promote(0, '#meters', 1, true);

  update fairq.queues q
  set metered = m.metered
  from (
    select u.queue, exists (
      select
      from fairq.groups g
      where g.shard_no = 0
        and g.queue = '#meters'
        and g.group_key in ('queue ' || u.queue, 'cluster')
        and coalesce(g.max_running, g.rate_limit, g.breaker_threshold) is not null
    ) as metered
    from fairq.queues u
    where not u.internal
  ) m
  where q.queue = m.queue
    and q.metered <> m.metered;
end;
$$;
comment on function fairq._configure_meter(text, text, integer, integer, interval, integer, integer, interval, text[]) is
  'Writes the limits of a whole queue or of the cluster.';
