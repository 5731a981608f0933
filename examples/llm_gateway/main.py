"""An LLM gateway: three tenants share a model by tokens, whatever and however much they ask for.

    python examples/llm_gateway/main.py        # about 20 seconds; needs only fairq[demo]

Acme floods the gateway, Globex asks for long answers, Initech for short ones. A few users of each send most,
and share what their tenant gets with its other users. The tokens of an answer are known only at its end: then
the worker charges them, and the queue settles the difference to what it expected. The model is made up: it
sleeps as long as a small GPU would take.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import random
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg

import fairq
from fairq import embedded, install
from fairq.worker import Worker

TOKENS_PER_SECOND = 40_000  # of one slot
SLOTS = 16
LONGEST = 10_000
USERS = 10  # of each tenant


@dataclass(frozen=True)
class Tenant:
    name: str
    weight: float
    prompts_per_second: int  # that it sends: more than its share
    median: float  # tokens of its answers, log-normal


TENANTS = (
    Tenant("acme", weight=2, prompts_per_second=1_500, median=300),
    Tenant("globex", weight=1, prompts_per_second=120, median=2_500),
    Tenant("initech", weight=1, prompts_per_second=2_500, median=80),
)

app = fairq.App()
answered: list[tuple[float, str, str | None, int]] = []  # when, for which tenant and user, how many tokens


@dataclass
class Prompt:
    max_tokens: int


async def model(prompt: Prompt, median: float) -> int:
    """The tokens of an answer, after the time it takes to generate them."""
    tokens = min(prompt.max_tokens, max(10, round(random.lognormvariate(math.log(median), 0.8))))
    await asyncio.sleep(tokens / TOKENS_PER_SECOND)
    return tokens


@app.task(queue="llm", kind="answer")
async def answer(prompt: Prompt, ctx: fairq.Context) -> None:
    median = next(tenant.median for tenant in TENANTS if tenant.name == ctx.group_key)
    tokens = await model(prompt, median)
    ctx.charge(tokens)
    answered.append((time.monotonic(), ctx.group_key, ctx.user_key, tokens))


def fill(conn: psycopg.Connection, seconds: float) -> None:
    """Enqueue all prompts before the first answer; user 1 sends the most, each further user less."""
    ranks = range(1, USERS + 1)
    for tenant in TENANTS:
        count = int(tenant.prompts_per_second * seconds)
        users = [*ranks, *random.choices(ranks, [1 / rank for rank in ranks], k=count)]
        prompts = [fairq.Item(tenant.name, Prompt(LONGEST), user=f"user {user}") for user in users]
        answer.enqueue_many(conn, prompts, cost=LONGEST)


def share(dsn: str, seconds: float) -> float:
    """Run the gateway, and return when it began."""
    install.migrate(dsn)
    with psycopg.connect(dsn) as conn:
        fairq.configure_queue(conn, "llm", fairness="cost", ready_target=SLOTS)
        for tenant in TENANTS:
            fairq.configure_group(conn, "llm", tenant.name, weight=tenant.weight)
        fill(conn, seconds)
    worker = Worker(app, dsn, queues=["llm"], concurrency=SLOTS)
    threading.Timer(seconds, worker.stop).start()
    began = time.monotonic()
    worker.run()
    with psycopg.connect(dsn) as conn:
        for tenant in TENANTS:
            fairq.purge_group(conn, "llm", tenant.name)
    return began


def table() -> str:
    """A table of what each tenant received and was entitled to, and of its busiest user's part."""
    tokens, busiest, answers = Counter[str](), Counter[str](), Counter[str]()
    for _, tenant, user, used in answered:
        answers[tenant] += 1
        tokens[tenant] += used
        if user == "user 1":
            busiest[tenant] += used
    weights = sum(tenant.weight for tenant in TENANTS)
    lines = ["tenant    weight   answers      tokens   received   entitled   its busiest user"]
    for each in TENANTS:
        lines.append(
            f"{each.name:10}{each.weight:6.0f}{answers[each.name]:10,}{tokens[each.name]:12,}"
            f"{tokens[each.name] / tokens.total():11.1%}{each.weight / weights:11.1%}"
            f"{busiest[each.name] / max(tokens[each.name], 1):19.1%}"
        )
    return "\n".join(lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument(
        "--dsn", default=os.environ.get("FAIRQ_DSN"), help="the database; default: a temporary PostgreSQL"
    )
    options.add_argument("--seconds", type=float, default=12, help="how long the gateway runs")
    options.add_argument(
        "--plot", type=Path, default=Path("llm_gateway.png"), help="the file for a plot of the shares"
    )
    given = options.parse_args()
    with ExitStack() as stack:
        dsn = given.dsn or stack.enter_context(embedded.start()).dsn()
        began = share(dsn, given.seconds)
    print(table())
    try:
        from plot import draw
    except ImportError:
        print("no plot: pip install matplotlib")
        return
    draw(given.plot, began, answered, {tenant.name: tenant.weight for tenant in TENANTS})
    print(f"\n{given.plot}: received against entitled share")


if __name__ == "__main__":
    main()
