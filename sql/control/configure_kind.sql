-- Declares what holds for the tasks of a kind in a queue, however they are created: columns of fairq.kinds, see _check_settings. A task may ask for fewer
-- attempts, not for more. Existing tasks keep what they have. Only the app that owns a kind changes it: no other app does, nor one without a name, whose
-- owner is ''.
-- Returns what is declared. Raises QF003 unknown queue, QF006 bad kind, QF007 bad number, QF009 bad timeout, QF014 an unknown setting, or a kind of another
-- owner. Locks: settings; kinds, one row.
create function fairq.configure_kind(p_queue text, p_kind text, p_settings jsonb default '{}') returns fairq.kinds
language plpgsql security definer set search_path = pg_catalog, pg_temp set jit = 'off' as $$
declare
  v_kind fairq.kinds;
  v_changes jsonb;
begin
  perform from fairq.settings s for update;
  perform fairq._queue(p_queue);
  perform fairq._check_name('the kind', p_kind, 200, 'QF006', 'Name the handler');
  insert into fairq.kinds (queue, kind) values (p_queue, p_kind) on conflict do nothing;
  select k.* into v_kind from fairq.kinds k where k.queue = p_queue and k.kind = p_kind;
  v_changes := fairq._check_settings(format('kind "%s" of queue "%s"', p_kind, p_queue), 'fairq.kinds', to_jsonb(v_kind), p_settings);
  if v_kind.owner <> v_changes ->> 'owner' then
    if jsonb_populate_record(v_kind, v_changes - 'owner') is distinct from v_kind then
      raise exception 'kind "%" of queue "%" belongs to "%"', p_kind, p_queue, v_kind.owner
        using errcode = 'QF014',
          hint = format('Declare the same, or give yours another name; or free it: select fairq.configure_kind(%L, %L, ''{"owner": null}'');', p_queue, p_kind);
    end if;
    return v_kind;
  end if;
  v_changes := case when v_changes ->> 'owner' = '' then v_changes - 'owner' else v_changes end;
  if v_changes <> '{}' then
    v_kind := jsonb_populate_record(v_kind, v_changes);
    execute 'update fairq.kinds k set ' || fairq._assignments(v_changes) || ' where k.queue = $2 and k.kind = $3' using v_kind, p_queue, p_kind;
  end if;
  return v_kind;
end;
$$;
comment on function fairq.configure_kind is
  'Declares attempts, priority, cost and timeout of the tasks of a kind. An absent setting stays as it is; null removes one.';
