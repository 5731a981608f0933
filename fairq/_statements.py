"""The statements that the client sends. Every parameter is cast from what any driver can send: see
connections.py.
"""

from __future__ import annotations

CREATE_TASK = """
select fairq.create_task(
  p_group_key => $1::text,
  p_payload => $2::text::jsonb,
  p_queue => $3::text,
  p_kind => $4::text,
  p_priority => $5::integer,
  p_run_at => $6::text::timestamptz,
  p_expires_at => $7::text::timestamptz,
  p_max_attempts => $8::integer,
  p_cost => $9::double precision,
  p_timeout => $10::text::interval,
  p_idempotency_key => $11::text,
  p_concurrency_key => $12::text,
  p_headers => $13::text::jsonb
)"""

CREATE_TASKS = """
select c.id
from fairq.create_tasks(
  p_group_keys => $1::text[],
  p_payloads => $2::text[]::jsonb[],
  p_queue => $3::text,
  p_kind => $4::text,
  p_priority => $5::integer,
  p_run_at => $6::text::timestamptz,
  p_expires_at => $7::text::timestamptz,
  p_max_attempts => $8::integer,
  p_cost => $9::double precision,
  p_timeout => $10::text::interval,
  p_idempotency_keys => $11::text[],
  p_concurrency_keys => $12::text[],
  p_headers => $13::text::jsonb,
  p_priorities => $14::integer[],
  p_costs => $15::double precision[]
) as c(id)"""

CANCEL_TASK = "select fairq.cancel_task($1::bigint)"

FINISH_TASK = """
select f.id
from fairq.finish_tasks(
  p_worker_id => $1::bigint,
  p_ids => array[$2::bigint],
  p_attempts => array[$3::integer],
  p_outcomes => array[$4::text],
  p_results => array[$5::text::jsonb],
  p_errors => array[$6::text::jsonb],
  p_retry_delays => array[$7::text::interval]
) as f(id)"""

# One statement, so one snapshot: a task is seen live or ended, never neither while it moves.
TASK_RESULT = """
select f.outcome,
  to_char(f.finished_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"') as finished_at,
  f.result::text as result,
  f.error::text as error,
  exists (select from fairq.tasks t where t.shard_no = any(s.shard_nos) and t.id = $1::bigint) as live,
  current_setting('transaction_isolation') as isolation,
  now()::text as transaction_began,
  pg_current_xact_id_if_assigned() is not null as has_written
from (select array(select fairq._shards(null)) as shard_nos) s
left join lateral (
  select r.outcome, r.finished_at, r.result, r.error
  from fairq.finished_tasks r
  where r.shard_no = any(s.shard_nos)
    and r.id = $1::bigint
  order by r.finished_at desc
  limit 1
) f on true"""

LISTENS = "select exists (select from pg_listening_channels()) as listens"
LISTEN_DONE = "listen fairq_done"
UNLISTEN_DONE = "unlisten fairq_done"

# What fairq.testing needs to be a worker in the test's own transaction.
REGISTER_WORKER = "select fairq.register_worker($1::text, $2::text[], 1, interval '1 hour')"
RETIRE_WORKER = "select fairq.retire_worker($1::bigint)::text"
POP_TASK = """
select t.id, t.attempt, t.max_attempts, t.queue, t.group_key, t.kind,
  extract(epoch from t.timeout)::double precision, t.headers::text, t.payload::text
from fairq.pop_tasks(p_queue => $1::text, p_limit => 1, p_worker_id => $2::bigint) t"""
SET_CLOCK = "select set_config('fairq.now', $1::text, true)"
LIVE_TASKS = """
select t.id, t.queue, t.kind, t.group_key, t.state, t.priority, t.attempt,
  to_char(t.run_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'), t.headers::text,
  t.payload::text, t.concurrency_key, t.idempotency_key
from fairq.tasks t
where t.shard_no = any(array(select fairq._shards(null)))
  and ($1::text is null or t.kind = $1::text)
  and ($2::text is null or t.queue = $2::text)
  and ($3::text is null or t.group_key = $3::text)
order by t.id"""
