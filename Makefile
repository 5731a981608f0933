# Everything runs in a virtual environment, .venv, that is made on first use. See CONTRIBUTING.md.

.DEFAULT_GOAL := help
.PHONY: help demo test check format test-long test-django storm walks fuzz chaos alarms nightly test-matrix test-pythons test-shards test-standby test-managed test-citus test-ground bench bench-quick ci clean

PYTHON ?= python3
export PYTHON
# Tests start hundreds of processes, and each would compile its imports.
unexport PYTHONDONTWRITEBYTECODE

# How many processes run tests (one more than there are processors, because some wait), and further arguments for
# pytest: make test ARGS="-k overflow -x"
JOBS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2) + 1)
ARGS ?=
PYTEST = -n $(JOBS) --dist worksteal $(ARGS)

# The PostgreSQL versions of `make test-matrix`, as npm names them.
POSTGRES ?= 15.18.0-beta.17 16.14.0-beta.17 17.10.0-beta.17 18.4.0-beta.17

# What `make test-citus` runs besides tests/citus: the engine, and everything that calls it. Each database there is a cluster of
# one node; tests/support/cluster.py lists what cannot hold.
ON_CITUS ?= tests/sql tests/policies tests/properties tests/races tests/worker tests/api tests/cli tests/web

# The versions of `make test-pythons`.
PYTHONS ?= 3.11 3.12 3.13 3.14

VENV_INPUTS = pyproject.toml constraints.txt .ci/venv

help: ## Show this text
	@echo "fairq: a multi-tenant fair queue that lives in PostgreSQL"
	@echo
	@echo "You need only Python 3.11 or newer, git and make. Start with:"
	@echo "  make demo"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' Makefile | awk -F'|' '{printf "%-16s%s\n", $$1, $$2}'
	@echo
	@echo "Variables: JOBS=2 (test processes), ARGS='-k overflow -x' (for pytest), PYTHON=/path/to/python3,"
	@echo "FAIRQ_PG_BIN, FAIRQ_TEST_DSN, FAIRQ_TEST_BACKEND (see CONTRIBUTING.md)"

demo: .venv/.demo ## Watch Bob's 10,000 tasks run beside other tenants' few
	@.venv/bin/python -m fairq demo $(ARGS)

test: .venv/.dev ## Run all tests
	@.venv/bin/python -m pytest $(PYTEST)

check: .venv/.dev ## Run the static checks: ruff, mypy, squawk, plpgsql_check, generated code
	@.ci/check

format: .venv/.dev ## Format the Python code
	@.venv/bin/python -m ruff check --fix-only --quiet . ; .venv/bin/python -m ruff format .

test-long: .venv/.dev ## Run the contracts of plans, held snapshots and policies with 1,000,000 tasks (needs npm)
	@FAIRQ_TEST_ROWS=1000000 FAIRQ_TEST_LEDGER=60 .ci/matrix $(lastword $(POSTGRES)) -- $(PYTEST) tests/contract/test_plans.py tests/contract/test_held_xmin.py tests/policies/test_adversaries.py tests/policies/test_cost.py tests/sql/test_ledger.py tests/web/test_bounded.py

test-matrix: .venv/.dev ## Run all tests on PostgreSQL 15, 16, 17 and 18 (needs npm)
	@FAIRQ_TEST_KEPT=0 .ci/matrix $(POSTGRES) -- $(PYTEST)

test-pythons: .venv/.dev ## Run all tests on the installed ones of Python 3.11 to 3.14, and pyright on the samples
	@.ci/pythons $(PYTHONS) -- $(PYTEST)

test-shards: .venv/.dev ## Run all tests with 16 shards instead of one
	@FAIRQ_TEST_SHARDS=16 .venv/bin/python -m pytest $(PYTEST)

test-standby: .venv/.dev ## Run failovers, pg_rewind, pg_upgrade and a move by logical replication
	@FAIRQ_TEST_SERVERS=1 .venv/bin/python -m pytest $(PYTEST) tests/chaos/test_failover.py tests/chaos/test_servers.py

test-managed: .venv/.dev ## Run the suites of the engine as an ordinary role behind PgBouncer, as on a managed service
	@PATH=$$PATH:/usr/sbin:/usr/local/sbin; command -v pgbouncer >/dev/null || \
	{ echo "test-managed: skipped, PgBouncer is not installed; on Debian: apt-get install pgbouncer"; exit 0; }; \
	FAIRQ_TEST_MANAGED=1 .venv/bin/python -m pytest $(PYTEST) tests/sql tests/policies tests/races tests/worker tests/api

test-citus: .venv/.dev ## Run the tests of Citus on three nodes of a PostgreSQL that has it: CITUS_PG_BIN=/folder/of/its/bin
	@.ci/citus "$(CITUS_PG_BIN)" -- $(PYTEST) tests/citus $(ON_CITUS)

test-django: .venv/.dev ## Run the tests of frameworks on each version of Django and package of its tasks
	@FAIRQ_TEST_DJANGO=1 .venv/bin/python -m pytest $(PYTEST) tests/contrib

storm: .venv/.dev ## Run a storm of processes for a minute, and stop calls between any two statements
	@FAIRQ_TEST_STORM=$(or $(FAIRQ_TEST_STORM),60) FAIRQ_TEST_STOPS=1 .venv/bin/python -m pytest $(PYTEST) tests/races/test_storm.py tests/races/test_moving_storm.py tests/races/test_stops.py tests/races/test_moving_groups.py

walks: .venv/.dev ## Call everything in random order, a hundred times, and check after each step (ten minutes)
	@FAIRQ_TEST_WALKS=$(or $(FAIRQ_TEST_WALKS),100) .venv/bin/python -m pytest $(PYTEST) tests/policies/test_walk.py

fuzz: .venv/.dev ## Call every function and command with odd arguments, 100,000 times (ten minutes)
	@FAIRQ_TEST_FUZZ=100000 FAIRQ_TEST_PASSES=100000 .venv/bin/python -m pytest $(PYTEST) tests/fuzz tests/web/test_signing.py

chaos: .venv/.dev ## Inject faults around a queue for ten minutes, and print how long each was felt
	@FAIRQ_TEST_CHAOS=$(or $(FAIRQ_TEST_CHAOS),600) .venv/bin/python -m pytest -s $(ARGS) tests/chaos/test_chaos.py
	@FAIRQ_TEST_SCHEDULES=$(or $(FAIRQ_TEST_CHAOS),600) .venv/bin/python -m pytest -s $(ARGS) tests/chaos/test_schedules.py

alarms: .venv/.dev ## Run fairq doctor during an hour of mixed load
	@FAIRQ_TEST_ALARMS=$(or $(FAIRQ_TEST_ALARMS),3600) .venv/bin/python -m pytest -s $(ARGS) tests/worker/test_alarms.py

nightly: ## Run what takes too long for every change: the targets above from test-long to alarms, but test-citus
	@status=0; for each in storm walks fuzz chaos alarms test-long test-django test-matrix test-pythons test-shards test-standby test-managed; do $(MAKE) $$each || status=1; done; exit $$status

model: .venv/.dev ## Explore the models of tests/model in larger worlds (two minutes)
	@FAIRQ_TEST_MODEL=1 .venv/bin/python -m pytest $(PYTEST) tests/model

test-ground: ## Prove that `make demo` and `make test` work in a clean clone and leave nothing behind (root, Linux)
	@ARGS='$(ARGS)' .ci/prove

bench: .venv/.dev ## Measure everything at full size (a night)
	@.venv/bin/python -m fairq bench run --scale full $(ARGS)

bench-quick: .venv/.dev ## Measure everything but other queues, small (ten minutes)
	@.venv/bin/python -m fairq bench run --scale quick --without peers $(ARGS)

ci: ## Run what every change must pass
	@.ci/run

clean: ## Remove everything that was made here
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/.demo: $(VENV_INPUTS)
	@.ci/venv demo

.venv/.dev: $(VENV_INPUTS)
	@.ci/venv dev
