"""Writes down what releases of a framework have of the names that Sublet needs, in releases.json: parameters, nothing of bodies.

    python record_releases.py NAME FOLDER VERSION      # an unpacked wheel
    python record_releases.py NAME GIT_DIRECTORY TAG   # a repository at a tag or commit

`modules` of a framework says where its modules are, and which names are meant; of a class that is named alone all methods are, and
all fields of a dataclass. A module or name that a release lacks is left out of its record.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Optional

from record import of, parameters

RECORD = Path(__file__).resolve().parent / "releases.json"


def main() -> None:
    """The command."""
    name, place, version = sys.argv[1:]
    record = json.loads(RECORD.read_text())
    framework = record[name]
    is_wheel = not (Path(place) / "objects").is_dir()
    release: dict[str, object] = {"wheel": f"read {date.today()}"} if is_wheel else {"commit": commit(place, version)}
    for module, (path, names) in framework["modules"].items():
        text = source(place, version, path, is_wheel)
        if text is not None:
            release[module] = found(ast.parse(text), set(names))
    framework["releases"][version.lstrip("v")] = release
    RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


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


def found(tree: ast.Module, names: set[str]) -> dict[str, str]:
    """Parameters of the functions and methods that are meant; of a field, and of a constant, nothing."""
    functions = {name: parameters(function.args) for name, function in of(tree)}
    meant = {name: text for name, text in functions.items() if names.intersection((name, name.partition(".")[0]))}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in names:
            meant.update({f"{node.name}.{field}": "" for field in annotated(node.body)})
    meant.update({name: "" for name in annotated(tree.body) if name in names})
    return meant


def annotated(body: list[ast.stmt]) -> list[str]:
    """Names with an annotation."""
    targets = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


if __name__ == "__main__":
    main()
