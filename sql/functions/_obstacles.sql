-- What keeps a waiting task from being served now, beside its turn: a paused queue, the limits of its group, key, queue and of the cluster, in the order in
-- which it meets them. Reads the same lanes and the same _allowance as promotion and pop.
create function fairq._obstacles(
  p_shard_no integer,
  p_queue text,
  p_group_key text,
  p_concurrency_key text,
  p_state text,
  p_now timestamptz
) returns table (nth integer, reason text, look_at timestamptz)
language plpgsql
stable
rows 1
set search_path = ''
as $$
declare
  v_scope record;
  v_lane fairq.lanes;
  v_allowance fairq.allowance;
  v_holders text;
begin
  nth := 1;
  select format('queue "%s" is paused since %s', q.queue, q.paused_at) into reason
  from fairq.queues q
  where q.queue = p_queue
    and q.paused_at is not null;
  if found then
    return next;
  end if;

  for v_scope in
    values
      (2, p_shard_no, p_queue, p_group_key, format('group "%s"', p_group_key), p_state <> 'queued'),
      (3, p_shard_no, '#keys', p_concurrency_key, format('concurrency key "%s"', p_concurrency_key), p_state = 'blocked'),
      (4, 0, '#meters', 'queue ' || p_queue, format('queue "%s"', p_queue), true),
      (5, 0, '#meters', 'cluster', 'the cluster', true)
  loop
    continue when v_scope.column4 is null or not v_scope.column6;
    v_lane := fairq._lane(v_scope.column2, v_scope.column3, v_scope.column4);
    continue when v_lane.policy is null;
    v_allowance := fairq._allowance(v_lane.policy, v_lane.gate, p_now);
    continue when v_allowance.tasks > 0;
    nth := v_scope.column1;
    look_at := v_allowance.look_at;
    reason := format('%s: %s', v_scope.column5, v_allowance.reason);
    if v_scope.column3 = '#keys' then
      select string_agg(h.id::text, ', ' order by h.id) into v_holders
      from (
        select t.id
        from fairq.tasks t
        where t.shard_no = p_shard_no
          and t.concurrency_key = p_concurrency_key
          and t.block is not null
        limit 5
      ) h;
      reason := format('%s; held by task %s', reason, coalesce(v_holders, 'none'));
    end if;
    return next;
  end loop;
end;
$$;
comment on function fairq._obstacles(integer, text, text, text, text, timestamptz) is 'What keeps a waiting task from being served, beside its turn.';
