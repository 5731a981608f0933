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
