-- What a new installation begins with: one queue, the queues of the counters, and the history's first days.
insert into fairq.settings default values;
insert into fairq.queues (queue, internal, group_max_running) values ('default', false, null), ('#keys', true, 1), ('#cluster', true, null);
select fairq._open_domain(0, q.queue) from fairq.queues q;
insert into fairq.maintenance (shard_no) values (0);
select fairq._rotate_partitions();
