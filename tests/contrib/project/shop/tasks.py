import math
import signal
import time
from importlib import import_module
from typing import Any

from django.conf import settings
from django.db import connection

import fairq
from shop.models import Order

spaces: Any = import_module(settings.SPACE)
task = spaces.task
app = fairq.App()
app.queue("parcels", max_attempts=3)


@app.task(queue="parcels")
def send_parcel(payload: dict[str, Any]) -> None:
    Order.objects.create(name=payload["name"])


@app.task(queue="parcels")
async def send_letter(payload: dict[str, Any]) -> None:
    await Order.objects.acreate(name=payload["name"])


@task
def add(a: int, b: int = 1, tenant: str = "", user: str = "") -> int:
    return a + b


@task()
async def add_later(a: int, b: int = 1) -> int:
    return a + b


@task
async def order_later(name: str) -> int:
    return int((await Order.objects.acreate(name=name)).pk)


@task(queue_name="mail", priority=5)
def mail(to: str) -> str:
    return to


@task
def order(name: str) -> int:
    return int(Order.objects.create(name=name).pk)


@task
def twice(key: Any) -> Any:
    return {key: key * 2}


@task
def schema() -> str:
    return str(connection.schema_name)


@task(backend="of the request")
def follow_up() -> str:
    return str(add.using(backend="of the request").enqueue(1).id)


@task(backend="of the request")
async def follow_up_later() -> str:
    return str((await add.using(backend="of the request").aenqueue(1)).id)


@task
def fail(text: str = "no") -> None:
    raise ValueError(text)


@task
def fail_with_cause() -> None:
    raise ValueError(ValueError("the inner one"))


@task
async def fail_later() -> None:
    raise ValueError("later")


@task(backend="stubborn", queue_name="mail", takes_context=True)
def third_time_lucky(context: Any) -> int:
    if context.attempt < 3:
        raise ConnectionError(f"attempt {context.attempt}")
    return int(context.attempt)


@task
def exits() -> None:
    raise SystemExit(3)


@task
def interrupts() -> None:
    raise KeyboardInterrupt


@task
def returns_itself() -> Any:
    return returns_itself


@task
def unlimited() -> float:
    return math.inf


@task(takes_context=True)
def about(context: Any, a: int) -> list[Any]:
    result = context.task_result
    return [context.attempt, result.id, str(result.status), result.args, result.attempts, a]


@task
def lazily(seconds: float) -> float:
    time.sleep(seconds)
    return seconds


@task
def backend_pid() -> int:
    with connection.cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        return int(cursor.fetchone()[0])


@task
def kills_its_worker() -> None:
    signal.raise_signal(signal.SIGKILL)


def no_task() -> None: ...
