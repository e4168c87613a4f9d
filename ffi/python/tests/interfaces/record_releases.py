"""Writes down what releases of a framework have of the names that Sublet needs, in releases.json: parameters, nothing of bodies.

    python record_releases.py NAME FOLDER VERSION      # an unpacked wheel
    python record_releases.py NAME GIT_DIRECTORY TAG   # a repository at a tag or commit

`modules` of a framework says where each module is and which names are `wanted`; of a class that is named alone all methods are, and all
fields of a dataclass; `VARIABLE->` means the methods that are called of a variable, with the names of the arguments. Releases that
agree share a record: `names` has, for each span of releases, what is the same in all of them. A name that a release lacks is in no span of it.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any, Optional

from record import of, parameters

RECORD = Path(__file__).resolve().parent / "releases.json"
#: In the place of parameters.
FIELD = "(field)"
#: By release, module and name: the parameters.
Releases = dict[str, dict[str, dict[str, str]]]


def main() -> None:
    """The command."""
    name, place, version = sys.argv[1:]
    record = json.loads(RECORD.read_text())
    framework = record[name]
    is_wheel = not (Path(place) / "objects").is_dir()
    releases = expanded(framework)
    release = version.lstrip("v")
    releases[release] = {}
    framework["releases"][release] = f"wheel, read {date.today()}" if is_wheel else commit(place, version)
    for module, entry in framework["modules"].items():
        text = source(place, version, entry["path"], is_wheel)
        if text is not None:
            releases[release][module] = found(ast.parse(text), entry["wanted"].split())
    framework["releases"] = {each: framework["releases"][each] for each in sorted(releases, key=_age)}
    for module, entry in framework["modules"].items():
        entry["names"] = shared([(each, releases[each].get(module, {})) for each in framework["releases"]])
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def expanded(framework: dict[str, Any]) -> Releases:
    """What each release has, in the order of releases; of a module without any name nothing."""
    order = list(framework["releases"])
    releases: Releases = {release: {} for release in order}
    for module, entry in framework["modules"].items():
        for span, names in entry["names"].items():
            first, _, last = span.partition(" to ")
            for release in order[order.index(first) : order.index(last or first) + 1]:
                releases[release].setdefault(module, {}).update(names)
    return releases


def shared(releases: list[tuple[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    """The reverse, of one module: spans of releases that follow each other, longest first, and what is the same in all of a span."""
    spans: dict[tuple[int, int], dict[str, str]] = {}
    wanted = {(name, text) for _, names in releases for name, text in names.items()}
    for name, text in sorted(wanted):
        has = [index for index, (_, names) in enumerate(releases) if names.get(name) == text]
        for _, run in itertools.groupby(enumerate(has), lambda pair: pair[1] - pair[0]):
            indexes = [index for _, index in run]
            spans.setdefault((indexes[0], indexes[-1]), {})[name] = text
    found_spans = sorted(spans.items(), key=lambda span: (span[0][0] - span[0][1], span[0][0]))
    return {
        " to ".join(dict.fromkeys((releases[first][0], releases[last][0]))): names
        for (first, last), names in found_spans
    }


def _age(release: str) -> tuple[bool, list[int]]:
    """Commits are newer than what has a number."""
    return "." not in release, [int(number) for number in re.findall(r"\d+", release) if "." in release]


def commit(place: str, version: str) -> str:
    """The commit and its date."""
    return git(place, "log", "-1", "--format=%h %ad", "--date=short", version).strip()


def git(place: str, *arguments: str) -> str:
    """What git answers."""
    return subprocess.run(["git", "-C", place, *arguments], check=True, text=True, capture_output=True).stdout


def source(place: str, version: str, path: str, is_wheel: bool) -> Optional[str]:
    """The text of a module; None where the release has none."""
    if is_wheel:
        file = Path(place, path)
        return file.read_text() if file.is_file() else None
    try:
        return git(place, "show", f"{version}:{path}")
    except subprocess.CalledProcessError:
        return None


def found(tree: ast.Module, names: list[str]) -> dict[str, str]:
    """Parameters of the functions and methods that are meant; of fields and constants only that there are such."""
    functions = {name: parameters(function.args) for name, function in of(tree)}
    meant = {name: text for name, text in functions.items() if {name, name.partition(".")[0]}.intersection(names)}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            meant.update({f"{node.name}.{field}": FIELD for field in annotated(node.body)})
    meant.update({name: FIELD for name in annotated(tree.body) if name in names})
    for variable in (name[:-2] for name in names if name.endswith("->")):
        meant.update({f"{variable}->{method}": given for method, given in called(tree, variable)})
    return meant


def annotated(body: list[ast.stmt]) -> list[str]:
    """Names with an annotation."""
    targets = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def called(tree: ast.Module, variable: str) -> Iterator[tuple[str, str]]:
    """The methods of a variable that are called, with the arguments' names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if isinstance(node.func.value, ast.Name) and node.func.value.id == variable:
                yield node.func.attr, ", ".join(word.arg for word in node.keywords if word.arg)


if __name__ == "__main__":
    main()
