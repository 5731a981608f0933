"""sqlc.yaml, as far as `fairq gen` needs it: where the schema and the queries are, and what to generate."""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from fairq.codegen.model import GenerationError, Options, parse_options

FILE_NAMES = ("sqlc.yaml", "sqlc.yml", "sqlc.json")
_PLUGIN = "sqlc-gen-fairq"


@dataclass(frozen=True, slots=True)
class Target:
    """One `codegen` entry: the options, and the folder for the files."""

    out: Path
    options: Options


@dataclass(frozen=True, slots=True)
class Entry:
    """One `sql` entry, with its files in order."""

    schema: tuple[Path, ...]
    queries: tuple[Path, ...]
    targets: tuple[Target, ...]

    @property
    def promised(self) -> tuple[str, ...]:
        """The functions that some target declares to return no NULL."""
        return tuple(name for target in self.targets for name in target.options.not_null_functions)


def find(folder: Path) -> Path:
    """The configuration in a folder, or in its `sql` folder."""
    for place in (folder, folder / "sql"):
        for name in FILE_NAMES:
            if (place / name).is_file():
                return place / name
    raise GenerationError(
        f"no {FILE_NAMES[0]} in {folder} or {folder / 'sql'}",
        hint="name the file: fairq gen --config path/sqlc.yaml",
    )


def read(path: Path) -> tuple[Entry, ...]:
    """The entries of a configuration file. Paths in it are relative to its folder."""

    def wrong(message: str, hint: str = "", place: str = str(path)) -> GenerationError:
        return GenerationError(message, hint=hint, path=place)

    text = text_of(path)
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as exc:
        raise wrong(f"cannot be read: {exc}") from exc
    if not isinstance(document, dict) or not isinstance(document.get("sql"), list):
        raise wrong("there is no list `sql`", 'use version "2" of the format')
    version = document.get("version")
    if str(version) != "2":
        raise wrong(f"version {version!r} of the format is not supported", 'use version: "2"')
    plugins = {str(plugin.get("name")): plugin for plugin in _maps(document, "plugins", str(path))}
    entries = []
    for number, entry in enumerate(_maps(document, "sql", str(path)), start=1):
        place = f"{path}: sql entry {number}"
        if entry.get("engine") != "postgresql":
            raise wrong(f"its engine is {entry.get('engine')!r}", "use engine: postgresql", place)
        targets = []
        for codegen in _maps(entry, "codegen", place):
            if not _is_ours(codegen, plugins):
                continue
            if not codegen.get("out"):
                raise wrong("a codegen entry has no `out`", "name the folder for the files", place)
            options = parse_options(codegen.get("options") or {}, place)
            targets.append(Target(path.parent / str(codegen["out"]), options))
        if targets:
            schema = _files(entry.get("schema"), path.parent, place, "schema")
            queries = _files(entry.get("queries"), path.parent, place, "queries")
            entries.append(Entry(schema, queries, tuple(targets)))
    if not entries:
        hint = f"declare {_PLUGIN} as a process plugin under `plugins`, and use it under `codegen`"
        raise wrong(f"no codegen entry uses {_PLUGIN}", hint)
    return tuple(entries)


def text_of(path: Path) -> str:
    """In UTF-8, whatever the locale says; some editors put a mark before it."""
    try:
        return path.read_text("utf-8-sig")
    except (OSError, ValueError) as exc:
        raise GenerationError(f"cannot be read: {exc}", path=str(path)) from exc


def _maps(where: Mapping[str, Any], what: str, place: str) -> list[dict[str, Any]]:
    found = where.get(what) or []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise GenerationError(f"`{what}` must be a list of maps", path=place)
    return found


def _is_ours(codegen: Mapping[str, Any], plugins: Mapping[str, Mapping[str, Any]]) -> bool:
    plugin = plugins.get(str(codegen.get("plugin")))
    if plugin is None:
        return codegen.get("plugin") == "fairq"
    process = plugin.get("process")
    return isinstance(process, dict) and Path(str(process.get("cmd"))).name == _PLUGIN


def _files(given: Any, folder: Path, place: str, what: str) -> tuple[Path, ...]:
    """The files of these paths, folders (their .sql files) and patterns, in order; each file once."""
    patterns = [given] if isinstance(given, str) else given
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise GenerationError(f"`{what}` must be a path or a list of paths", path=place)
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = folder / pattern
        if path.is_dir():
            files = sorted(path.glob("*.sql"))
        elif path.is_file():
            files = [path]
        else:
            files = sorted(
                Path(each) for each in glob.glob(str(path), recursive=True) if each.endswith(".sql")
            )
            if not files:
                message = f"`{what}`: {pattern} is no file or folder, and matches no .sql file"
                raise GenerationError(message, path=place)
        # Downgrades of migrations are not part of the schema.
        found.update(dict.fromkeys(file for file in files if not file.name.endswith(".down.sql")))
    return tuple(found)


def with_out(entries: tuple[Entry, ...], out: Path) -> tuple[Entry, ...]:
    """The only target, with another folder."""
    if len(entries) != 1 or len(entries[0].targets) != 1:
        raise GenerationError("--out needs a configuration with exactly one codegen entry")
    return (replace(entries[0], targets=(replace(entries[0].targets[0], out=out),)),)
