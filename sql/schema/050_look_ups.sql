-- The body of a task. "offset 0" keeps this a look-up of one id wherever it is asked: a join could become a walk through all tasks of the shard.
-- Stable, without "set search_path": it is inlined, and only the columns wanted are read.
create function fairq._body(p_shard_no integer, p_id bigint) returns setof fairq.tasks
language sql stable rows 1 as $$ select t.* from fairq.tasks t where t.shard_no = p_shard_no and t.id = p_id offset 0 $$;

-- Where a task in line is if it does not wait: held, ready or parked. No row: it waits. It returns a set because only a set is inlined; a boolean function that
-- looks into tables would be a call for each task. Three look-ups of one id in one set cannot become joins that walk through a whole table.
create function fairq._taken(p_shard_no integer, p_id bigint) returns setof integer
language sql stable rows 1 as $$
  select 1 from fairq.held h where h.shard_no = p_shard_no and h.id = p_id
  union all
  select 2 from fairq.ready r where r.shard_no = p_shard_no and r.id = p_id
  union all
  select 3 from fairq.parked k where k.shard_no = p_shard_no and k.id = p_id
$$;
