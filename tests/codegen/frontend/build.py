"""Generate a package from SQL texts against a real database, and import it."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg

from fairq.codegen import command, generate
from fairq.codegen.model import Catalog, Options, Query, Template

_numbers = itertools.count(1)


@dataclass(frozen=True)
class Package:
    """A generated package; `module("tasks")` is its module of that name."""

    name: str
    folder: Path
    files: Mapping[str, str]

    def module(self, name: str) -> Any:
        return importlib.import_module(f"{self.name}.{name}")


def connect(dsn: str, **kwargs: Any) -> psycopg.Connection[Any]:
    return psycopg.connect(dsn, autocommit=True, **kwargs)


def read(dsn: str, folder: Path, schema: str, queries: str) -> tuple[Catalog, tuple[Query, ...]]:
    """Load the schema into the database, and read it and the queries as the model."""
    file = folder / "queries.sql"
    file.write_text(queries)
    with connect(dsn) as conn:
        if schema:
            conn.execute(schema.encode())
        return command.read_database(conn, [file])


def options(package: str, **given: Any) -> Options:
    return Options(package=package, template=Template.PSYCOPG, **given)


def build(dsn: str, folder: Path, schema: str, queries: str, **given: Any) -> Package:
    """The package that `fairq gen` would write, imported from `folder`."""
    name = f"generated_{next(_numbers)}"
    found, read_queries = read(dsn, folder, schema, queries)
    files = generate(command.request(found, read_queries, options(name, **given)))
    target = folder / name
    target.mkdir()
    for file, text in files.items():
        (target / file).write_text(text)
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    return Package(name, target, files)


def forget(package: Package) -> None:
    """Undo the import, so that a thousand packages do not pile up."""
    for name in [name for name in sys.modules if name == package.name or name.startswith(f"{package.name}.")]:
        del sys.modules[name]
    if str(package.folder.parent) in sys.path:
        sys.path.remove(str(package.folder.parent))


def modules(package: Package) -> list[ModuleType]:
    return [package.module(name.removesuffix(".py")) for name in package.files if name != "__init__.py"]
