"""Break one line after the other, and count how many the tests notice.

    python -m tools.mutate --lines 30 --seed 1 --minutes 25

Works on a copy. It takes random lines of `sql/` and `fairq/` in turn, flips a comparison, drops a condition,
changes a number or removes a statement, and runs the tests of that file until the first fails. A line whose
change goes unnoticed needs a test, or is not needed.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTANT_SECONDS = 600

# The tests for files in these folders, fast ones first; the first match counts.
TESTS = {
    "sql": "sql policies races properties contract cli",
    "fairq/codegen": "codegen",
    "fairq/contrib": "contrib",
    "fairq/web": "web",
    "fairq/worker": "worker",
    "fairq/embedded.py": "embedded",
    "fairq/install.py": "migrations contract",
    "fairq": "api cli worker demo testing_plugin",
}
GENERATED = ("fairq/queries", "sql/queries")

SWAPS = [
    "<= <",
    ">= >",
    "== !=",
    "= <>",
    "and or",
    "is_null is_not_null",
    "is_None is_not_None",
    "true false",
]
SWAP = {
    one.replace("_", " "): two.replace("_", " ") for x in SWAPS for one, two in (x.split(), x.split()[::-1])
}
FOUND = {
    ".sql": rf"(?<=[ (])(?:{'|'.join(sorted(SWAP, reverse=True))})(?=[ )])|(?<![\w.'])\d+(?![\w.'])| desc\b"
    r"|^ *(?:and|or) .*[^;]$|^ *(?:perform|insert|update|delete|raise|return|v_\w+ :=).*;$",
    ".py": rf"(?<= )(?:{'|'.join(sorted(set(SWAP) - {'=', '<>'}, reverse=True))})(?= )"
    r"|(?<![\w.])\d+(?![\w.])|\bnot "
    r"|^ *(?!def|class|import|from|if|for|while|with|else|try|except)[\w.]+(?:\(| [-+|]?= | ).*[^:,([{]$",
}


def mutants(path: Path) -> Iterator[tuple[int, str]]:
    """All ways to break each line of code: its number, and its new text."""
    text, in_texts = path.read_text("utf-8"), set[int]()
    if path.suffix == ".py":  # docstrings and other multi-line strings
        texts = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant | ast.JoinedStr)]
        in_texts = {
            at for n in texts if n.lineno != (end := n.end_lineno or 0) for at in range(n.lineno, end + 1)
        }
    for number, line in enumerate(text.splitlines()):
        code = re.split(" *--|  #", line)[0]
        if number + 1 in in_texts or re.match(r" *(#|'|comment on|language|@|assert)", code):
            continue
        for found in re.finditer(FOUND[path.suffix], code):
            before, what = code[: found.start()], found[0]
            if before.count("'") % 2 == 0 and before.count('"') % 2 == 0:
                new = SWAP.get(what, str(int(what) + 1) if what.isdigit() else "")
                if path.suffix == ".py" and what == code:
                    new = " " * (len(code) - len(code.lstrip())) + "pass"
                yield number, before + new + code[found.end() :]


def draw(folder: str, source: random.Random) -> Iterator[tuple[Path, int, str]]:
    """Mutants of random lines, no line twice, all equally likely."""
    by_line: dict[tuple[Path, int], list[str]] = {}
    for path in sorted((ROOT / folder).rglob("*.sql" if folder == "sql" else "*.py")):
        if not str(path.relative_to(ROOT)).startswith(GENERATED):
            for number, new in mutants(path):
                by_line.setdefault((path.relative_to(ROOT), number), []).append(new)
    for path, number in source.sample(sorted(by_line), len(by_line)):
        yield path, number, source.choice(by_line[path, number])


def test(copy: Path, *arguments: str) -> str:
    """The first test that fails; empty if none does; `!`: nothing can be loaded; `?`: it took too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
    env, limit = {**os.environ, "PYTHONPATH": str(copy)}, MUTANT_SECONDS
    try:
        done = subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return "?"
    failed = re.search(r"(?m)^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout)
    if not done.returncode or not failed or "Loading sql/ failed" in done.stdout:
        return "!" if done.returncode else ""
    return failed[1]


def judge(copy: Path, path: Path, number: int, new: str, left_out: set[str]) -> str:
    """What `test` says of this mutant; tests that also fail without it are left out from now on."""
    before = (copy / path).read_text("utf-8")
    lines = before.splitlines()
    lines[number] = new
    tests = next(TESTS[each] for each in TESTS if path.is_relative_to(each)).split()
    while True:
        (copy / path).write_text("\n".join(lines) + "\n", "utf-8")
        found = test(copy, "-n2", *(f"tests/{x}" for x in tests), *(f"--deselect={x}" for x in left_out))
        (copy / path).write_text(before, "utf-8")
        if "::" not in found or not test(copy, found):
            return found
        left_out.add(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (("lines", 30), ("seed", 1), ("minutes", 25)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.minutes * 60
    source = random.Random(asked.seed)
    drawn = [draw(folder, source) for folder in ("sql", "fairq")]
    noticed, survived, left_out = 0, 0, {"tests/races/test_storm.py"}  # which differs each time
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "fairq"
        ignored = shutil.ignore_patterns(".git", ".venv", ".cache", "__pycache__", ".*_cache", "results")
        shutil.copytree(ROOT, copy, ignore=ignored)
        while noticed + survived < asked.lines and time.monotonic() < deadline:
            path, number, new = next(drawn[(noticed + survived) % 2])
            old = (copy / path).read_text("utf-8").splitlines()[number]
            said = judge(copy, path, number, new, left_out)
            noticed, survived = noticed + (said not in ("", "!", "?")), survived + (said == "")
            if said != "!":
                place = f"{noticed + survived}/{asked.lines} {path}:{number + 1}"
                print(f"{place} {said or 'SURVIVED'}\n  - {old.strip()}\n  + {new.strip()}", flush=True)
    print(f"{noticed} noticed, {survived} survived; left out: {sorted(left_out)}")


if __name__ == "__main__":
    main()
