-- Cursors of a lane after rings: per priority the smaller sequence, highest priority first.
create function fairq._merge_cursors(p_cursors fairq.cursor[], p_heard fairq.cursor[]) returns fairq.cursor[]
language sql
immutable
as $$
  select coalesce(array_agg((c.priority, c.sequence)::fairq.cursor order by c.priority desc), '{}')
  from (
    select u.priority, min(u.sequence) as sequence
    from unnest(p_cursors || p_heard) u
    group by u.priority
  ) c
$$;
comment on function fairq._merge_cursors(fairq.cursor[], fairq.cursor[]) is 'Lowers the cursors of a lane to what was heard.';
