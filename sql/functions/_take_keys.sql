-- The next tasks of a lane some of which have concurrency keys, in order: those without a key, and those that get a place of their key right now.
-- One whose key is taken becomes blocked and is passed over: it holds nobody up, not even its own group. One row more than p_quota is
-- returned, whose key is not looked at: where the lane goes on.
-- Locks: lanes of #keys, whose domain the caller holds, too; tasks, the rows that become blocked.
-- Cost: tasks_overflow_idx from the cursors, p_quota rows and those that become blocked; each of those once until its key is freed.
create function fairq._take_keys(
  p_tick fairq.ticks,
  p_group_key text,
  p_cursors fairq.cursor[],
  p_weight double precision,
  p_pace fairq.pace,
  p_quota integer,
  p_now timestamptz
) returns table (ctid tid, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint)
language plpgsql
volatile
rows 10
set search_path = ''
as $$
declare
  v_cursor fairq.cursor;
  v_task record;
  v_found integer := 0;
  v_blocked tid[] := array[]::tid[];
begin
  foreach v_cursor in array p_cursors loop
    for v_task in
      select t.ctid, t.priority, t.sequence, t.kind, t.cost, t.concurrency_key, t.expires_at is not null and t.expires_at <= p_now as is_expired
      from fairq.tasks t
      where t.shard_no = p_tick.shard_no
        and t.queue = p_tick.queue
        and t.group_key = p_group_key
        and t.state = 'overflow'
        and t.priority = v_cursor.priority
        and t.sequence >= v_cursor.sequence
      order by t.sequence
    loop
      if v_found < p_quota and not v_task.is_expired and v_task.concurrency_key is not null
        and not fairq._take_place(p_tick.shard_no, '#keys', v_task.concurrency_key, p_now)
      then
        v_blocked := v_blocked || v_task.ctid;
        continue;
      end if;
      v_found := v_found + 1;
      ctid := v_task.ctid;
      priority := v_task.priority;
      sequence := v_task.sequence;
      is_expired := v_task.is_expired;
      charge := case when p_pace is distinct from null then fairq._expected(p_pace, v_task.kind, v_task.cost) end;
      step := case when v_task.is_expired then 0 else fairq._step(coalesce(charge, v_task.cost), p_weight) end;
      return next;
      exit when v_found > p_quota;
    end loop;
    exit when v_found > p_quota;
  end loop;
  perform fairq._block(p_tick.shard_no, v_blocked);
end;
$$;
comment on function fairq._take_keys(fairq.ticks, text, fairq.cursor[], double precision, fairq.pace, integer, timestamptz) is
  'The next tasks of a lane whose tasks have concurrency keys.';
