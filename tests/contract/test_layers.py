"""What each part of the package may import, and which modules send SQL. See ARCHITECTURE.md."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT

# A part imports from its own layer and those before it. An application that enqueues loads the first four.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "dsn"),
    ("driver", "codec", "backoff", "queries"),
    ("connections", "options"),
    (
        "client",
        "results",
        "policies",
        "ledger",
        "context",
        "batch",
        "schedules",
        "task",
        "around",
        "app",
        "outcome",
    ),
    ("citus", "install", "embedded", "metrics"),
    ("worker", "testing", "otel"),
    ("cli",),
    ("commands", "web", "codegen", "demo", "pytest_plugin", "_keeper"),
    ("contrib",),
    ("__init__", "__main__"),
)
# Nobody imports these.
ALONE = {"_keeper", "pytest_plugin", "demo", "testing", "__main__"}

# Modules that send statements, and what. All others call what these offer.
SENDERS = {
    "driver": "the generated calls",
    "connections": "the same calls on connections of SQLAlchemy, Django and asyncpg",
    "citus": "the nodes, and what lets calls go between them",
    "install": "the engine's files, the deltas and the version",
    "worker.keeper": "the time that upkeep has",
    "worker.listen": "LISTEN, and a NOTIFY to itself",
    "worker.turns": "begin and commit, where a turn needs more than one statement",
    "commands.common": "what commands ask of tables and views",
    "commands.doctor": "the time that a check has, and a notification to itself",
    "codegen.catalog": "a schema, and a function for each statement",
    "contrib.django.admin": "shards, and what no model has of a task",
    "contrib.django.base": "whether a queue is there",
    "contrib.django.operations": "a migration's way back",
    "contrib.django.testing": "what empties a test database",
    "demo.engines": "both queues",
    "demo.run": "its session",
    "embedded": "databases that are dropped in the end",
    "pytest_plugin": "that tests may set the clock",
}
SENDING = {"execute", "executemany", "exec_driver_sql"}


def modules() -> dict[str, Path]:
    """Every module of the package by its name below fairq."""
    found = {}
    for path in sorted((ROOT / "fairq").rglob("*.py")):
        parts = path.relative_to(ROOT / "fairq").with_suffix("").parts
        if parts[-1] == "__init__" and len(parts) > 1:
            parts = parts[:-1]
        found[".".join(parts)] = path
    return found


def part_of(module: str) -> str:
    return module.split(".")[0]


def imports(path: Path) -> Iterator[str]:
    """The parts of fairq that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            base = node.module or ""
            names = [f"fairq.{each.name}" for each in node.names] if base == "fairq" else [base]
        else:
            continue
        for name in names:
            if name.startswith("fairq."):
                yield name.split(".")[1]


def layer_of(part: str) -> int:
    (layer,) = (number for number, parts in enumerate(LAYERS) if part in parts)
    return layer


def test_every_part_has_its_layer() -> None:
    assert {part_of(module) for module in modules()} == {part for parts in LAYERS for part in parts}


@pytest.mark.parametrize(("module", "path"), modules().items(), ids=modules())
def test_a_module_imports_from_its_own_layer_and_those_before(module: str, path: Path) -> None:
    part = part_of(module)
    known = {each for parts in LAYERS for each in parts}
    for each in {*imports(path)} & known - {part}:
        assert layer_of(each) <= layer_of(part), f"fairq.{module} imports fairq.{each}"
        # What a framework adds for tests is for tests, too.
        ok = each not in ALONE or (each, module.split(".")[-1]) == ("testing", "testing")
        assert ok, f"fairq.{module} imports fairq.{each}, which stands alone"


def sends(path: Path) -> bool:
    """Whether a module runs statements on a connection or a cursor."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in SENDING:
            return True
    return False


def test_only_these_modules_send_statements() -> None:
    assert {module for module, path in modules().items() if sends(path)} == set(SENDERS)


def test_a_worker_names_no_table_of_the_engine() -> None:
    """It calls functions through `fairq.queries`, so tables may change independently."""
    tables = re.findall(r"^create table fairq\.(\w+)", _tables(), re.MULTILINE)
    assert len(tables) > 10
    named = re.compile(rf"\b(?:from|join|into|update|truncate) fairq\.(?:{'|'.join(tables)})\b(?! import)")
    for module, path in modules().items():
        if part_of(module) in ("worker", "client", "results", "policies", "connections", "app", "task"):
            assert not named.search(path.read_text("utf-8")), module


def _tables() -> str:
    return (ROOT / "sql" / "schema" / "030_tables.sql").read_text("utf-8")


def test_architecture_names_every_file_of_the_way() -> None:
    """A file by its path; files of a folder that is off the way by the folder's."""
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    named = set(re.findall(r"`((?:fairq|sql|migrations)/[\w./]+)`", page))
    for path in [*(ROOT / "fairq").rglob("*.py"), *(ROOT / "sql").rglob("*.sql")]:
        name = path.relative_to(ROOT).as_posix()
        if not name.endswith(("/__init__.py", "/__main__.py", "/queries/models.py")):
            folders = [f"{parent.as_posix()}/" for parent in Path(name).parents[:-1]]
            assert name in named or {*folders} & named, f"{name} is not in ARCHITECTURE.md"
    for name in named:
        assert (ROOT / name).exists(), f"ARCHITECTURE.md names {name}"


def test_architecture_draws_the_layers() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    rows = re.findall(r"^ *\| \d \| (.*) \|$", page, re.MULTILINE)
    assert [tuple(re.findall(r"`(\w+)`", row)) for row in rows] == list(LAYERS[:-1])
