-- What Python asks the ledger.

-- name: ReadShares :many
-- Who got what: one row per group, also for the group that is named; the group '' is all others together.
-- fairq: nullable weight, debt, bound, wait_p50, wait_p95, waiting_since, backlog, backlog_seconds, eta_seconds, limited_by, behind
select s.group_key, s.groups, s.weight, s.tasks, s.seconds, s.cost, s.received, s.entitled, s.debt, s.bound, s.wait_p50, s.wait_p95,
  to_char(s.waiting_since at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as waiting_since,
  s.backlog, s.backlog_seconds, s.eta_seconds, s.limited_by, s.behind::text as behind,
  s.received / nullif(sum(s.received) over (), 0) as received_part, s.entitled / nullif(sum(s.received) over (), 0) as entitled_part
from fairq.shares(
  p_queue => sqlc.arg(queue)::text, p_since => sqlc.arg(seconds)::double precision * interval '1 second', p_limit => sqlc.arg(max_groups)::integer,
  p_group_key => sqlc.narg(group_key)::text
) s;

-- name: ReadFairness :one
-- How fair a queue is.
-- fairq: not null groups
-- fairq: nullable worst_debt, worst_group, idle_slots, newcomer_p99, wait_p50, wait_p95, ledger_until
select f.groups, f.tasks, f.seconds, f.shortfall, f.jain, f.worst_debt, f.worst_group, f.idle_slots, f.newcomer_p99, f.wait_p50, f.wait_p95,
  to_char(f.ledger_until at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"')::text as ledger_until
from fairq.fairness(p_queue => sqlc.arg(queue)::text, p_since => sqlc.arg(seconds)::double precision * interval '1 second') f;
