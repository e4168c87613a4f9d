"""Writes down what we know of a framework's interface: names, parameters, and the order of some calls.

    python record.py GIT_DIRECTORY NAME.json [COMMIT]
    python record.py FOLDER NAME.json VERSION

reads a repository at a commit (default HEAD), or an unpacked wheel, and writes the recording again, for the
modules and names that it lists already. Parameters are recorded without annotations; of bodies only which of the names under `calls`
are called, in their order.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]


def main() -> None:
    """The command."""
    repository, path = sys.argv[1], Path(sys.argv[2])
    recording = json.loads(path.read_text())
    asked = sys.argv[3] if len(sys.argv) > 3 else "HEAD"
    if "version" in recording:
        recording["version"] = asked
    else:
        recording["commit"] = git(repository, "rev-parse", asked).strip()
    for name, module in recording["modules"].items():
        if "version" in recording:
            source = Path(repository, module["path"]).read_text()
        else:
            source = git(repository, "show", f"{recording['commit']}:{module['path']}")
        record(name, module, ast.parse(source))
    path.write_text(json.dumps(recording, indent=1) + "\n")


def git(repository: str, *arguments: str) -> str:
    """What git answers."""
    return subprocess.run(
        ["git", "-C", repository, *arguments], check=True, text=True, capture_output=True
    ).stdout


def record(name: str, module: dict[str, Any], tree: ast.Module) -> None:
    """Brings one module's entry up to date; a name that is gone ends the program."""
    functions = dict(of(tree))
    for wanted, entry in module["functions"].items():
        if wanted not in functions:
            sys.exit(f"{name} has no {wanted} any more")
        function = functions[wanted]
        entry["parameters"] = parameters(function.args)
        if "calls" in entry:
            known = set(entry["calls"])
            entry["calls"] = [call for call in calls(function) if call in known]
    imported = {
        alias.name: f"{'.' * node.level}{node.module or ''}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for wanted in module.get("imports", {}):
        if wanted not in imported:
            sys.exit(f"{name} does not import {wanted} any more")
        module["imports"][wanted] = imported[wanted]


def of(tree: ast.Module) -> Iterator[tuple[str, Function]]:
    """All functions and methods, by name."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    yield f"{node.name}.{inner.name}", inner


def parameters(arguments: ast.arguments) -> str:
    """The parameters with their defaults, without annotations."""
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return ast.unparse(arguments)


def calls(function: Function) -> list[str]:
    """What is called, by its dotted name, in the order of the text."""
    found = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
    found.sort(key=lambda node: (node.lineno, node.col_offset))
    return [ast.unparse(node.func) for node in found]


if __name__ == "__main__":
    main()
