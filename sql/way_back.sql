-- Before what the first revision made is dropped: refused while there are rows that are the user's, not the engine's bookkeeping.
do $$
declare
  v_table text;
  v_rows text;
  v_any boolean;
begin
  for v_table, v_rows in
    values
      -- They are locked first: who fires them inserts. An app declares its own again.
      ('schedules', 'owner is null'),
      ('tasks', 'true'),
      ('finished_tasks', 'true'),
      ('groups', 'true'),
      ('queues', 'queue <> ''default'' and not internal')
  loop
    -- What was released first may lack it.
    continue when to_regclass(format('fairq.%I', v_table)) is null;
    -- What is being enqueued at this moment counts as well: wait for it, then look.
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
