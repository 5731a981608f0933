-- Checks whether fairq can be installed on this cluster, from this node: if not, it raises what is missing, and how to mend it. fairq/citus.py sends this
-- before anything else, so nothing of fairq exists yet.
do $$
declare
  v_oldest constant integer := 13;
  v_version constant text := (select e.extversion from pg_extension e where e.extname = 'citus');
  v_away text;
  v_having integer;
  v_shards integer;
begin
  if substring(v_version from '^\d+')::integer < v_oldest then
    raise object_not_in_prerequisite_state using
      message = format('the database has Citus %s, and fairq needs %s or newer', v_version, v_oldest),
      hint = 'Upgrade Citus on all nodes: its packages, a restart, then alter extension citus update;';
  end if;

  if (select l.groupid from pg_dist_local_group l) <> 0 then
    raise object_not_in_prerequisite_state using
      message = 'this is a worker node of Citus',
      hint = 'Run fairq migrate on the coordinator: ' || coalesce(
        (select concat_ws(' ', n.nodename, n.nodeport) from pg_dist_node n where n.noderole = 'primary' and n.groupid = 0),
        'another node');
  end if;

  if not exists (select from pg_dist_node n where n.noderole = 'primary' and n.groupid = 0) then
    raise object_not_in_prerequisite_state using
      message = 'the coordinator is not among the nodes of its own cluster, so settings would not reach it',
      hint = 'Add it, and its workers: select citus_set_coordinator_host(''host'', 5432); select citus_add_node(''host'', 5432);';
  end if;

  v_away := (
    select string_agg(concat_ws(':', n.nodename, n.nodeport), ', ' order by n.groupid)
    from pg_dist_node n
    where n.noderole = 'primary' and not (n.isactive and (n.groupid = 0 or n.hasmetadata and n.metadatasynced))
  );
  if v_away is not null then
    raise object_not_in_prerequisite_state using
      message = format('not all nodes take part: %s', v_away),
      hint = 'Activate each (select citus_activate_node(''host'', 5432);), or take it out (citus_remove_node).';
  end if;

  v_having := (select count(*) from pg_dist_node n where n.noderole = 'primary' and n.shouldhaveshards);
  if v_having = 0 then
    raise object_not_in_prerequisite_state using
      message = 'no node may have shards, so there is no place for tasks',
      hint = 'Add nodes (select citus_add_node(''host'', 5432);), or let the coordinator have them: '
        'select citus_set_node_property(''host'', 5432, ''shouldhaveshards'', true);';
  end if;

  v_shards := (select count(*) from pg_dist_shard h where h.logicalrelid = to_regclass('fairq_citus.calls'));
  if v_shards = 0 then
    v_shards := current_setting('citus.shard_count')::integer;
  end if;
  if v_shards < v_having then
    raise object_not_in_prerequisite_state using
      message = format('%s shards cannot be spread over %s nodes', v_shards, v_having),
      hint = 'Before fairq is installed, set citus.shard_count to several times the nodes you will ever have; later, let fewer nodes have shards: '
        'select citus_set_node_property(''host'', 5432, ''shouldhaveshards'', false);';
  end if;
end;
$$;
