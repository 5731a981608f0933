"""docs/reference/requirements.md explains exactly the ids that tests cite."""

import re

from tests.support.processes import ROOT

ID = re.compile(r"\b(?:HR|[FHSDI])\d{1,2}\b")
README = [f"I{number}" for number in range(1, 13)]


def cited() -> dict[str, str]:
    """Every id in a docstring or comment of the tests, with a file that cites it."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        if "golden" in path.parts or path.name == "test_requirements.py":
            continue
        for text in re.findall(r'"""(.*?)"""|#(.*)$', path.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            found |= dict.fromkeys(ID.findall("".join(text)), path.name)
    return found


def explained() -> set[str]:
    page = (ROOT / "docs" / "reference" / "requirements.md").read_text("utf-8")
    rows = re.findall(r"^- ([^:]+):", page, re.MULTILINE)
    return {each for row in rows for each in ID.findall(row)} | {*README}


def test_every_id_that_a_test_cites_is_explained() -> None:
    assert {each: where for each, where in cited().items() if each not in explained()} == {}


def test_every_requirement_is_cited_by_a_test() -> None:
    assert explained() - set(cited()) == set()


def test_the_readme_has_the_first_twelve_promises() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    assert re.findall(r"^\| (I\d+) \|", readme, re.MULTILINE) == README
