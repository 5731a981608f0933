-- Holds a group: none of its tasks starts before p_until; null ends a hold. Ready tasks go back in line, running tasks go on. A worker holds a group with the
-- end of a task (p_holds of finish_tasks). Of several holds the one that ends last counts.
-- Raises QF001 group key, QF003 unknown queue, QF005 not READ COMMITTED, QF009 a time that is past, or more than 366 days away.
-- Locks: the domain, if nobody promotes; to end a hold, waits for it.
create function fairq.hold_group(p_queue text, p_group_key text, p_until timestamptz) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_shard_no integer := fairq._group_shard(p_queue, p_group_key);
begin
  perform fairq._check_until(format('group "%s"', p_group_key), p_until);
  if p_until is null then
    -- The lane first hears all its news; from here on no other session writes it.
    v_shard_no := fairq._lock_group(p_queue, p_group_key);
    perform fairq._promote(v_shard_no, p_queue, 1, true);
    perform fairq._end_hold(v_shard_no, p_queue, p_group_key);
  end if;
  perform fairq._ring_group(v_shard_no, p_queue, p_group_key, p_hold_until => p_until);
  perform fairq._promote(v_shard_no, p_queue, 1, p_until is null);
end;
$$;
comment on function fairq.hold_group is 'Starts nothing of a group before a time; null ends a hold.';

-- Raises QF009 when it is no time for the end of a hold.
create function fairq._check_until(p_of text, p_until timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  if not isfinite(p_until) or p_until <= fairq._now() or p_until > fairq._now() + interval '366 days' then
    raise exception '% cannot be held until %', p_of, p_until
      using errcode = 'QF009', hint = 'A time to come, at most 366 days away; null ends a hold.';
  end if;
end;
$$;

-- Writes the next version of a lane, or of a counter, without its hold.
-- Locks: lanes, one row replaced; the caller holds the domain.
create function fairq._end_hold(p_shard_no integer, p_queue text, p_group_key text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_lane fairq.lanes := fairq._lane(p_shard_no, p_queue, p_group_key);
begin
  if (v_lane.gate).held_until is not null then
    v_lane.gate.held_until := null;
    v_lane.gate.held_by := null;
    perform fairq._write_lane(v_lane);
  end if;
end;
$$;
