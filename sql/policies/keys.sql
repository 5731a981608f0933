-- Concurrency keys. A key is a counter (a lane of #keys, whose gate says how many places are taken) with a list of tasks that wait for it. Only a task that
-- is served now takes a place, or a parked task that is granted one. Each says so in its own row, and gives back what that row says.

-- The next tasks, in order, of a lane that has tasks with concurrency keys: tasks in line that need no key or get a place of theirs now, and parked tasks
-- that were granted a place. A task in line whose key has no place is parked and passed over: it holds nobody up, not even its own group. It is parked once
-- per wait. A granted task is found in parked, so the lane's cursor does not go back for it.
-- A task that came back meanwhile may stand before a younger granted task of its group: it takes over the place, and the younger one waits again (I12).
-- A lane parks or passes over at most p_most tasks in a pass. Then it steps back until the next pass, so that nobody waits for it, and rings for that pass.
-- Where slots are kept for short tasks, a long task is parked as well, together with the place of its key, until _let_long gives it a slot.
-- Beyond p_reach no place is taken: the lane stops there until a pop gets that far. With a rate, it stops there at any task. At p_room its budget ends.
-- Returns up to p_quota tasks, and one row more: the task at which the lane stops, and where it goes on.
-- Locks: lanes of #keys, parked; the caller holds the domains of the queue and of #keys.
-- Cost: in tasks_line_idx from the cursors, p_quota rows and those passed over; parked_granted_idx.
create function fairq._take_keys(
  p_tick fairq.ticks, p_lane fairq.lanes, p_quota integer, p_reach bigint, p_room bigint, p_most integer, p_short_under double precision,
  p_now timestamptz
)
returns table (id bigint, priority integer, sequence bigint, is_expired boolean, charge double precision, step bigint, keyed boolean, stops boolean,
  meets_key boolean, yields boolean, touched bigint, is_open boolean, attempt integer, expires_at timestamptz, long boolean, cost double precision)
language plpgsql rows 10 set search_path = pg_catalog, pg_temp as $$
declare
  c_granted cursor for
    select t.id, t.priority, t.sequence, t.kind, t.cost, t.attempt, t.expires_at, t.concurrency_key, null::bigint as touched, false as is_open,
      k.concurrency_key = '' as has_slot
    from fairq.parked k
    cross join lateral fairq._body(p_tick.shard_no, k.id) t
    where k.shard_no = p_tick.shard_no and k.queue = p_tick.queue and k.group_key = p_lane.group_key and k.user_key = p_lane.line and k.granted
    order by k.priority desc, k.sequence;
  -- One priority level at a time, each in the order of the index.
  c_line cursor for
    select t.*, c.touched, c.is_open, false as has_slot
    from unnest(p_lane.cursors) c
    cross join lateral (
      select b.id, b.priority, b.sequence, b.kind, b.cost, b.attempt, b.expires_at, b.concurrency_key
      from fairq.tasks b
      where b.shard_no = p_tick.shard_no and b.queue = p_tick.queue and b.group_key = p_lane.group_key and b.user_key = p_lane.line
        and not b.scheduled and (-b.priority, b.sequence) >= (-c.priority, c.sequence)
        and -b.priority <= case when c.is_open then 2147483647 else -c.priority end
      order by -b.priority, b.sequence
    ) t;
  v_given record;
  v_waiting record;
  v_task record;
  v_is_granted boolean;
  v_served bigint[] := array[]::bigint[];
  v_parked text[] := array[]::text[];
  v_found integer := 0;
  v_passed integer := 0;
begin
  meets_key := true;
  open c_granted;
  open c_line;
  fetch c_granted into v_given;
  fetch c_line into v_waiting;
  loop
    -- When the lane is about to step back after p_most tasks passed over, all granted tasks come first.
    v_is_granted := v_given.id is not null
      and (v_waiting.id is null or v_passed >= p_most or (-v_given.priority, v_given.sequence) <= (-v_waiting.priority, v_waiting.sequence));
    if v_is_granted and (v_found >= p_quota or p_lane.finish >= p_room) then
      insert into fairq.rings (shard_no, queue, group_key, user_key, sequence, keyed)
      values (p_tick.shard_no, p_tick.queue, p_lane.group_key, nullif(p_lane.line, ''), v_given.sequence, true);
      v_given.id := null;
      continue;
    elsif v_is_granted then
      v_task := v_given;
      fetch c_granted into v_given;
      -- Skip it if a task that came back has taken over its place.
      continue when not exists (select from fairq.parked k where k.shard_no = p_tick.shard_no and k.id = v_task.id and k.granted);
    else
      exit when v_waiting.id is null;
      v_task := v_waiting;
    end if;
    yields := not v_is_granted and v_passed >= p_most;
    if not v_is_granted and not yields then
      fetch c_line into v_waiting;
      -- A granted task stands in line as well.
      continue when v_task.id = any(v_served);
      if v_task.sequence <= v_task.touched or v_task.concurrency_key is not null or p_short_under < 'infinity' then
        -- A task taken before may be held, and its holder may end it or put it off between the cursor's snapshot and this statement. So look at body and
        -- holder again, in one statement, which also reads the present attempt.
        select b.attempt into v_task.attempt from fairq.tasks b
        where b.shard_no = p_tick.shard_no and b.id = v_task.id and not b.scheduled
          and not exists (select from fairq._taken(p_tick.shard_no, b.id));
        if not found then
          v_passed := v_passed + 1;
          continue;
        end if;
      end if;
    end if;
    id := v_task.id;
    priority := v_task.priority;
    sequence := v_task.sequence;
    touched := v_task.touched;
    is_open := v_task.is_open;
    attempt := v_task.attempt + 1;
    expires_at := v_task.expires_at;
    is_expired := coalesce(expires_at <= p_now, false);
    keyed := v_task.concurrency_key is not null and not is_expired;
    charge := case when (p_lane.pace).unit <> 'count' then fairq._expected(p_lane.pace, v_task.kind, v_task.cost, p_lane.weight) end;
    cost := coalesce(charge, v_task.cost);
    step := case when is_expired then 0 else fairq._step(cost, p_lane.weight) end;
    stops := yields or v_found >= p_quota or p_lane.finish >= p_room
      or (not is_expired and not v_is_granted and (keyed or fairq._runs_with_time(p_lane.policy, p_lane.gate)) and p_lane.finish >= p_reach);
    long := v_task.has_slot;
    if v_is_granted then v_served := v_served || id; end if;
    if v_is_granted and not is_expired then
      delete from fairq.parked k where k.shard_no = p_tick.shard_no and k.id = v_task.id;
    elsif keyed and not stops and not v_is_granted
      and not fairq._take_place(p_tick.shard_no, '#keys', v_task.concurrency_key, p_now)
      and not fairq._take_over(p_tick.shard_no, p_tick.queue, p_lane.group_key, p_lane.line, v_task.concurrency_key)
    then
      if v_task.concurrency_key = any(v_parked) then
        -- The first task parked in this pass has the group's turn, and stands before this one.
        insert into fairq.parked (shard_no, id, queue, group_key, user_key, concurrency_key, priority, sequence)
        values (p_tick.shard_no, v_task.id, p_tick.queue, p_lane.group_key, p_lane.line, v_task.concurrency_key, v_task.priority, v_task.sequence);
      else
        perform fairq._park(p_tick.shard_no, p_tick.queue, p_lane.group_key, p_lane.line, v_task.concurrency_key, v_task.id, v_task.priority, v_task.sequence);
        v_parked := v_parked || v_task.concurrency_key;
      end if;
      v_passed := v_passed + 1;
      continue;
    end if;
    -- Few attempts of its kind must say clearly that it is long, a single one by sixteen times: otherwise one slow start would send the next tasks behind long
    -- ones for minutes, and it would take long to learn that they are short.
    if cost > p_short_under and not is_expired and not long and not stops
      and cost > p_short_under * 16 / coalesce((select e.tasks from unnest((p_lane.pace).estimates) e where e.kind = v_task.kind), 16)
    then
      -- It keeps the place of its key: if it gave that back whenever no slot was free, it might never have both.
      -- A user's finish tag is in another virtual time; _let_long looks up where the group stands. No turn is before the one served last.
      perform fairq._park(p_tick.shard_no, p_tick.queue, p_lane.group_key, p_lane.line, '', id, priority, sequence,
        greatest(case when p_lane.queue = p_tick.queue then p_lane.finish else p_tick.clock end, p_tick.long_turn));
      v_passed := v_passed + 1;
      continue;
    end if;
    return next;
    if yields then
      insert into fairq.rings (shard_no, queue, group_key, user_key, keyed)
      values (p_tick.shard_no, p_tick.queue, p_lane.group_key, nullif(p_lane.line, ''), true);
    end if;
    exit when stops;
    v_found := v_found + 1;
    p_lane.finish := p_lane.finish + step;
  end loop;
  -- Otherwise they stay open until the transaction ends; up to PostgreSQL 15 another call could not open a cursor of the same name.
  close c_granted;
  close c_line;
end;
$$;

-- Takes the place that was granted to the last task of a line, for one further ahead; the last one waits again.
-- Returns false when no task of the line has been granted one.
create function fairq._take_over(p_shard_no integer, p_queue text, p_group_key text, p_user_key text, p_concurrency_key text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_last record;
begin
  delete from fairq.parked k
  where k.shard_no = p_shard_no
    and k.id = (
      select g.id from fairq.parked g
      where g.shard_no = p_shard_no and g.queue = p_queue and g.group_key = p_group_key and g.user_key = p_user_key and g.granted
        and g.concurrency_key = p_concurrency_key
      order by g.priority, g.sequence desc limit 1
    )
  returning k.id, k.priority, k.sequence into v_last;
  if not found then return false; end if;
  perform fairq._park(p_shard_no, p_queue, p_group_key, p_user_key, p_concurrency_key, v_last.id, v_last.priority, v_last.sequence);
  return true;
end;
$$;

-- Takes places of a concurrency key, or of a meter. A key that is not in use has no lane: then its policy is looked up.
-- Returns false, and takes none, when there are not as many. Locks: lanes, one row replaced; the caller holds the domain of p_queue.
create function fairq._take_place(p_shard_no integer, p_queue text, p_group_key text, p_now timestamptz, p_places integer default 1)
returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_lane fairq.lanes := fairq._counter(p_shard_no, p_queue, p_group_key);
begin
  if v_lane.policy is null then return true; end if;
  if (fairq._allowance(v_lane.policy, v_lane.gate, p_now)).tasks < p_places then return false; end if;
  v_lane.gate := fairq._charge(v_lane.policy, v_lane.gate, p_places, p_now);
  perform fairq._write_lane(v_lane);
  return true;
end;
$$;

-- Parks a task whose key has no place, or a long one. The first task of its group at this key gets the group's next turn there; groups take turns by their
-- weights, as in their queue. Long tasks are served by p_turn, where their group stands in virtual time.
create function fairq._park(
  p_shard_no integer, p_queue text, p_group_key text, p_user_key text, p_concurrency_key text, p_id bigint, p_priority integer, p_sequence bigint,
  p_turn bigint default null
) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_first record;
  v_turn bigint;
begin
  select k.id, k.priority, k.sequence, k.turn into v_first from fairq.parked k
  where k.shard_no = p_shard_no and k.concurrency_key = p_concurrency_key and k.queue = p_queue and k.group_key = p_group_key and not k.granted
  order by -k.priority, k.sequence limit 1;
  -- A group that is new to a key starts at the key's clock, and not before the groups that wait there.
  v_turn := coalesce(v_first.turn, p_turn, greatest((fairq._lane(p_shard_no, '#keys', p_concurrency_key)).finish, (
    select k.turn from fairq.parked k
    where k.shard_no = p_shard_no and k.concurrency_key = p_concurrency_key and k.turn is not null
    order by k.turn limit 1
  ), 0));
  if (-v_first.priority, v_first.sequence) < (-p_priority, p_sequence) then
    update fairq.parked k set turn = v_turn where k.shard_no = p_shard_no and k.id = v_first.id and k.turn is null;
    v_turn := null;
  elsif v_first.turn is not null then
    update fairq.parked k set turn = null where k.shard_no = p_shard_no and k.id = v_first.id;
  end if;
  insert into fairq.parked (shard_no, id, queue, group_key, user_key, concurrency_key, priority, sequence, turn)
  values (p_shard_no, p_id, p_queue, p_group_key, p_user_key, p_concurrency_key, p_priority, p_sequence, v_turn);
end;
$$;

-- Hears which keys have free places, and grants each place to a task that waits for it, in the order of turns. The task has the place from this statement on,
-- in its own row; a ring is written, and its lane places it next.
-- A task whose group cannot go on (paused, capped, limited) goes back in line instead, and meets the key again when its group may go on: no task waits for a
-- key that has room, and none holds a place that it cannot use. So a task is woken once per wait, and a free place costs the same however many wait.
-- Workers of other queues than p_queue, which is being promoted, sleep: they are told of what became free for theirs.
-- Locks: parked rows with "skip locked", for purge and cancel may hold rows of other queues; the caller holds #keys.
-- Cost: the keys that rang; parked_turn_idx from the key's clock, one step per place and per group that cannot go on, at most 1000 per key and pass.
create function fairq._open_keys(p_shard_no integer, p_now timestamptz, p_queue text default null) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_key fairq.lanes;
  v_first fairq.parked;
  v_granted integer;
  v_others text[];
begin
  foreach v_key in array fairq._hear_counters(p_shard_no, '#keys', p_now) loop
    v_granted := 0;
    if (v_key.gate).held_until > p_now then perform fairq._empty_key(p_shard_no, v_key.group_key); end if;
    for v_round in 1 .. 1001 loop
      exit when (fairq._allowance(v_key.policy, v_key.gate, p_now)).tasks <= v_granted;
      select k.* into v_first from fairq.parked k
      where k.shard_no = p_shard_no and k.concurrency_key = v_key.group_key and k.turn >= v_key.finish
      order by k.turn, k.id limit 1 for update skip locked;
      -- The next pass looks again at tasks that were locked, which are leaving, and at those for which this pass had no step left.
      if not found or v_round > 1000 then
        insert into fairq.rings (shard_no, queue, group_key)
        select p_shard_no, '#keys', v_key.group_key
        where exists (
          select from fairq.parked k
          where k.shard_no = p_shard_no and k.concurrency_key = v_key.group_key and k.turn >= v_key.finish
        );
        exit;
      end if;
      -- The clock of the key: not past a locked task, which may stay after all.
      select k.turn into v_key.finish from fairq.parked k
      where k.shard_no = p_shard_no and k.concurrency_key = v_key.group_key and k.turn >= v_key.finish
      order by k.turn limit 1;
      if fairq._may_go_on(p_shard_no, v_first.queue, v_first.group_key, v_first.user_key, p_now) then
        perform fairq._grant(v_first);
        v_granted := v_granted + 1;
      else
        perform fairq._unpark(p_shard_no, array[v_first.id]);
      end if;
      if v_first.queue is distinct from p_queue then v_others := v_others || v_first.queue; end if;
    end loop;
    v_key.gate := fairq._charge(v_key.policy, v_key.gate, v_granted, p_now);
    perform fairq._write_lane(v_key);
  end loop;
  if v_others is not null then
    perform pg_notify('fairq', q.queue) from fairq.queues q where q.queue = any(v_others) and q.notify;
  end if;
end;
$$;

-- Gives a parked task the place of its key, or the slot, that it waits for; its group's next one there has the turn. The lane need not go back for the task,
-- see _take_keys: so the ring names no priority.
create function fairq._grant(p_parked fairq.parked) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  update fairq.parked k set granted = true, turn = null where k.shard_no = p_parked.shard_no and k.id = p_parked.id;
  insert into fairq.rings (shard_no, queue, group_key, user_key, sequence, keyed)
  values (p_parked.shard_no, p_parked.queue, p_parked.group_key, nullif(p_parked.user_key, ''), p_parked.sequence, true);
  perform fairq._next_turn(p_parked);
end;
$$;

-- Empties a key that is held. Groups with ready tasks that have a place of it are recalled. Granted tasks that are not placed yet stand in line again, and so
-- do long tasks that wait for a slot with a place of the key. Whoever takes places holds the lock of #keys, so all that was made ready has been committed.
-- Locks: parked; the caller holds #keys. Cost: the ready set of the shard, the tasks that were granted any key, and the long ones that wait.
create function fairq._empty_key(p_shard_no integer, p_concurrency_key text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  insert into fairq.rings (shard_no, queue, group_key, configured)
  select distinct r.shard_no, r.queue, r.group_key, true
  from fairq.ready r
  cross join lateral fairq._body(p_shard_no, r.id) b
  where r.shard_no = p_shard_no and r.keyed_at is not null and b.concurrency_key = p_concurrency_key;
  perform fairq._unpark(p_shard_no, array(
    select g.id from fairq.parked g where g.shard_no = p_shard_no and g.granted and fairq._key_of(g) = p_concurrency_key
    union all
    select l.id from fairq.parked l where l.shard_no = p_shard_no and l.concurrency_key = '' and not l.granted and fairq._key_of(l) = p_concurrency_key
  ));
end;
$$;

-- Puts parked tasks back in line, as far as they are still parked. They pass their groups' turns on. Granted tasks and long ones give back the places of
-- their keys. Locks: parked; the caller holds #keys.
create function fairq._unpark(p_shard_no integer, p_ids bigint[]) returns void
language plpgsql set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_bitmapscan = off as $$
declare
  v_gone fairq.parked[];
begin
  if p_ids = '{}' then return; end if;
  with gone as (
    delete from fairq.parked k where k.shard_no = p_shard_no and k.id = any(p_ids) returning k
  )
  select array_agg(g.k) into v_gone from gone g;
  perform fairq._next_turn(g) from unnest(v_gone) g where g.turn is not null;
  insert into fairq.rings (shard_no, queue, group_key, user_key, priority, sequence, keyed)
  select p_shard_no, g.queue, g.group_key, nullif(g.user_key, ''), g.priority, min(g.sequence), true
  from unnest(v_gone) g
  group by g.queue, g.group_key, g.user_key, g.priority;
  insert into fairq.rings (shard_no, queue, group_key, freed)
  select p_shard_no, '#keys', k.concurrency_key, count(*)
  from (select fairq._key_of(g) as concurrency_key from unnest(v_gone) g where g.granted or g.concurrency_key = '') k
  where k.concurrency_key is not null
  group by k.concurrency_key;
end;
$$;

-- Moves a group's turn at a key from a task that is no longer parked to its next one there, one step on by the group's weight. The task was the first, so the
-- scan begins behind it, not at the dead entries of all earlier ones. For long tasks the group's own finish tag is the turn, see _let_long.
create function fairq._next_turn(p_gone fairq.parked) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  update fairq.parked n
  set turn = p_gone.turn + case when p_gone.concurrency_key = '' then 0 else fairq._step(1, (
    select coalesce(g.weight, q.weight)
    from fairq.queues q
    left join fairq.groups g on g.shard_no = p_gone.shard_no and g.queue = q.queue and g.group_key = p_gone.group_key and g.user_key = ''
    where q.queue = p_gone.queue
  )) end
  where n.shard_no = p_gone.shard_no
    and n.id = (
      select k.id from fairq.parked k
      where k.shard_no = p_gone.shard_no and k.concurrency_key = p_gone.concurrency_key and k.queue = p_gone.queue
        and k.group_key = p_gone.group_key and (-k.priority, k.sequence) > (-p_gone.priority, p_gone.sequence)
        and not k.granted
      order by -k.priority, k.sequence limit 1
    );
end;
$$;

-- Whether a task of the group could be served now, by what its lane last knew and its settings. Not in a paused queue, in one without workers, in one that
-- left a key unused in the last ten seconds, or in one whose own cap, rate or breaker, or the cluster's cap, lets nothing pass.
create function fairq._may_go_on(p_shard_no integer, p_queue text, p_group_key text, p_user_key text, p_now timestamptz) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
  v_queue fairq.queues;
begin
  select q.* into v_queue from fairq.queues q where q.queue = p_queue;
  return v_queue.paused_at is null
    and exists (select from fairq.workers w where w.shard_no = p_shard_no and p_queue = any(w.queues) and w.lost_at is null)
    and not exists (
      select from to_timestamp(fairq._sweep_floor(p_shard_no, 'unused keys ' || p_queue) / 1000000.0) u(left_at)
      where u.left_at > p_now - interval '10 seconds' and u.left_at <= p_now
    )
    and not exists (
      select
      from (
        select p_shard_no, p_queue, p_group_key, ''
        union all
        select p_shard_no, fairq._users_of(p_queue), p_group_key, p_user_key
        where (fairq._lane(p_shard_no, p_queue, p_group_key)).inside is distinct from null
        union all
        select 0, '#' || s.scope, s.scope, '' from fairq._meters(p_queue) s
      ) m(shard_no, queue, group_key, user_key)
      cross join lateral (select fairq._policy_of(m.shard_no, m.queue, m.group_key, m.user_key) as policy offset 0) o
      where (select fairq._allowance(o.policy, l.gate, p_now, (l.pace).reserved) from fairq._lane(m.shard_no, m.queue, m.group_key, m.user_key) l).tasks < 1
    );
end;
$$;

-- Takes keys back from granted tasks whose group cannot go on after all; the tasks stand in line again.
-- Locks: parked; the caller holds the domain and #keys.
-- Cost: parked_granted_idx, the tasks of the queue that were granted a key or a slot and not placed yet.
create function fairq._take_keys_back(p_shard_no integer, p_queue text, p_now timestamptz) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
  perform fairq._unpark(p_shard_no, array(
    select k.id from fairq.parked k
    where k.shard_no = p_shard_no and k.queue = p_queue and k.granted
      and not fairq._may_go_on(p_shard_no, p_queue, k.group_key, k.user_key, p_now)
  ));
end;
$$;
