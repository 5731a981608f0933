-- Cursors of a lane after its tasks up to p_next were promoted: higher priorities are used up, lower ones untouched.
create function fairq._advance_cursors(p_cursors fairq.cursor[], p_next fairq.cursor) returns fairq.cursor[]
language sql
immutable
as $$
  select case
    when (p_next).sequence is null then '{}'::fairq.cursor[]
    when cardinality(p_cursors) = 1 then array[p_next]
    else array[p_next] || array(
      select u
      from unnest(p_cursors) u
      where u.priority < (p_next).priority
      order by u.priority desc
    )
  end
$$;
comment on function fairq._advance_cursors(fairq.cursor[], fairq.cursor) is 'Moves the cursors of a lane to its first task not promoted.';
