create function fairq._ran(p_started_at timestamptz, p_now timestamptz) returns double precision
language sql
immutable
parallel safe
as $$ select least(3600, greatest(0, coalesce(extract(epoch from p_now - p_started_at)::double precision, 0))) $$;
comment on function fairq._ran(timestamptz, timestamptz) is
  'Seconds of worker time that an attempt counts for: from its start to now, an hour at most, so that one that hangs does not banish its group; nothing when it never started.';
