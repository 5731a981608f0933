-- Runs before all that the first revision made is dropped. Refuses that while there are rows of the user's, beside the engine's own bookkeeping.
do $$
declare
  v_table text;
  v_rows text;
  v_any boolean;
begin
  for v_table, v_rows in
    values
      -- Schedules are locked first: firing them inserts tasks. Those with an owner do not count: their app declares them again.
      ('schedules', 'owner is null'),
      ('tasks', 'true'),
      ('finished_tasks', 'true'),
      ('groups', 'true'),
      ('queues', 'queue <> ''default'' and not internal')
  loop
    -- The first release may lack the table.
    continue when to_regclass(format('fairq.%I', v_table)) is null;
    -- Tasks that are being enqueued at this moment count as well: wait for them, then look.
    execute format('lock table fairq.%I in access exclusive mode', v_table);
    execute format('select exists (select from fairq.%I where %s)', v_table, v_rows) into v_any;
    if v_any then
      raise exception 'fairq still holds tasks, history or settings of yours, and this step would lose them'
        using errcode = 'QF090',
              hint = 'Let them end and save the history, or throw all away: drop schema fairq cascade.';
    end if;
  end loop;
end;
$$;
