create function fairq._last_block(p_pace fairq.pace, p_block bigint) returns fairq.pace
language sql
immutable
parallel safe
as $$ select case when p_pace is distinct from null then (coalesce(p_block, p_pace.last_block), p_pace.credit, p_pace.estimates)::fairq.pace end $$;
comment on function fairq._last_block(fairq.pace, bigint) is 'The pace of a lane whose last address is in this block; null: where it was.';
