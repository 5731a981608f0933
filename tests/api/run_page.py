"""Run the Python blocks of a documentation page in order, each in the names the ones before it left.

Usage: run_page.py PAGE DSN. The page finds `dsn`, and what it needs else: `engine`, `async_engine`, Django
configured.
"""

import ast
import asyncio
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from tests.api.addresses import alchemy_url, django_handler


def names_for(page: Path, dsn: str) -> dict[str, Any]:
    names: dict[str, Any] = {"dsn": dsn, "__name__": "page"}
    if "sqlalchemy" in page.name:
        import sqlalchemy
        from sqlalchemy.ext.asyncio import create_async_engine

        url = alchemy_url(dsn, "psycopg")
        names["engine"] = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
        names["async_engine"] = create_async_engine(url, poolclass=sqlalchemy.NullPool)
    if "django" in page.name:
        django_handler(dsn, configure=True)
    return names


def main(page: Path, dsn: str) -> None:
    names = names_for(page, dsn)
    with asyncio.Runner() as runner:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            code = compile(block, str(page), "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))
            else:
                exec(code, names)
    for test in [each for name, each in names.items() if name.startswith("test_") and callable(each)]:
        if not inspect.signature(test).parameters:
            test()
        else:
            import psycopg

            with psycopg.connect(dsn) as conn:
                test(conn)
                conn.rollback()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
