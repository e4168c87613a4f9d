"""One child process of a job: what it says comes back as rows, samples and facts, and its stacks when it hangs.

In the child, `row`, `sample` and `fact` print one line each. In the parent, `Child` starts it, under Sublet or plainly,
and `finish` adds what it said to the record.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import subletapi
from common import JobError, Result

_MARK = "@said "
_SAID = re.compile(rf"^{_MARK}(.*)$", re.MULTILINE)
WHEELS = common.JOBS.parent / "python"

# ---------------------------------------------------------------- in the child


def _say(kind: str, **fields: Any) -> None:
    print(_MARK + json.dumps({"kind": kind, **fields}), flush=True)


def row(what: str, passed: bool, detail: str = "") -> None:
    """A verdict."""
    _say("row", what=what, passed=bool(passed), detail=str(detail))


def sample(series: str, value: float) -> None:
    """One sample of a series."""
    _say("sample", series=series, value=value)


def fact(name: str, value: Any) -> None:
    """Something to be kept in the record, as JSON."""
    _say("fact", name=name, value=value)


def begin(life_s: float) -> None:
    """Called first: stacks of all threads, then the end, when the child lives longer than `life_s`."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(life_s, exit=True)


def wait_for_file(path: Path, timeout_s: float) -> None:
    """Waits until the parent has made `path`."""
    common.wait_until(f"the file {path.name}", path.exists, timeout_s, poll_s=0.005)


def versions() -> dict[str, Any]:
    """Of torch and what it brings."""
    import torch

    nccl = torch.cuda.nccl.version() if torch.cuda.is_available() else ()
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "nccl": ".".join(str(part) for part in nccl)}


# ---------------------------------------------------------------- in the parent


def package(work: Path, name: str) -> Path:
    """Installs the wheel of `name` that the bundle carries into a folder of its own, for PYTHONPATH."""
    folder = work / f"site-{name}"
    if folder.exists():
        return folder
    wheels = sorted(WHEELS.glob(f"{name}-*.whl"))
    if not wheels:
        given = importlib.util.find_spec(name)
        if given is not None and given.submodule_search_locations:
            return Path(next(iter(given.submodule_search_locations))).parent
        raise JobError(f"no wheel of {name} in {WHEELS.name}/ of the bundle, and it is not installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    command += ["--target", str(folder), str(wheels[-1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    if done.returncode != 0:
        raise JobError(f"pip cannot install {wheels[-1].name}: {done.stderr[-600:]}")
    return folder


def cuda_libraries() -> str:
    """The folders of the CUDA libraries that torch brings, for LD_LIBRARY_PATH."""
    found = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec is not None and spec.submodule_search_locations else []:
        found += sorted(str(path) for path in Path(root).glob("*/lib") if path.is_dir())
    return os.pathsep.join([*found, *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])


class Child:
    """A script of this folder in a process of its own."""

    def __init__(
        self,
        work: Path,
        label: str,
        command: Sequence[str],
        *,
        tenant: str | None = None,
        sites: Sequence[Path] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.label, self.log = label, work / f"{label}.log"
        self.log.touch()
        extra = {"PYTHONFAULTHANDLER": "1", **(env or {})}
        environment = common.child_env(extra)
        environment["PYTHONPATH"] = os.pathsep.join([*map(str, sites), environment["PYTHONPATH"]])
        full = [sys.executable, *command]
        self.process = common.spawn(subletapi.tenant_command(tenant, full), environment, self.log)

    def said(self) -> list[dict[str, Any]]:
        """What it has said so far."""
        answers = []
        for text in _SAID.findall(self.log.read_text(errors="replace")):
            with contextlib.suppress(ValueError):  # half a line
                answers.append(json.loads(text))
        return answers

    def fact(self, name: str) -> Any:
        """The last value of a fact, or None."""
        values = [said["value"] for said in self.said() if said["kind"] == "fact" and said["name"] == name]
        return values[-1] if values else None

    def wait_fact(self, name: str, timeout_s: float) -> Any:
        """Waits until the child has said a fact."""

        def ready() -> bool:
            if self.fact(name) is not None:
                return True
            if self.process.poll() is not None:
                raise JobError(f"{self.label} ended with {self.process.returncode} before '{name}': {self.why()}")
            return False

        try:
            common.wait_until(f"'{name}' of {self.label}", ready, timeout_s)
        except JobError:
            if self.process.poll() is None:
                self.abort()
            raise
        return self.fact(name)

    def tail(self, size: int = 1500) -> str:
        """The end of its output, but for what it said."""
        text = self.log.read_text(errors="replace")
        return "\n".join(line for line in text.splitlines() if not line.startswith(_MARK))[-size:]

    def why(self) -> str:
        """Its last line, which names the error where there was one, and then what came before."""
        text = self.tail()
        return f"{text.strip().splitlines()[-1] if text.strip() else 'it wrote nothing'}\n{text}"

    def abort(self) -> None:
        """Has it and the processes it started write their stacks, and ends them."""
        with contextlib.suppress(OSError):
            os.killpg(self.process.pid, signal.SIGABRT)
        time.sleep(1.0)
        print(f"---- {self.label}: last output\n{self.tail(6000)}\n----", flush=True)
        common.stop_child(self.process)

    def finish(self, result: Result, timeout_s: float, prefix: str | None = None) -> dict[str, Any]:
        """Waits for its end, and adds rows and samples to `result` under `prefix`; its facts."""
        prefix = self.label if prefix is None else prefix
        late = False
        try:
            self.process.wait(timeout_s)
            common.release(self.process)
        except subprocess.TimeoutExpired:
            late = True
            self.abort()
        facts: dict[str, Any] = {}
        for said in self.said():
            if said["kind"] == "row":
                result.check(f"{prefix}: {said['what']}", said["passed"], said["detail"])
            elif said["kind"] == "sample":
                result.sample(f"{prefix}_{said['series']}", said["value"])
            else:
                facts[said["name"]] = said["value"]
        result.data["versions"].update(facts.pop("versions", {}))
        result.data.setdefault("facts", {})[prefix] = facts
        code = self.process.returncode
        how = f"not within {timeout_s:.0f} s" if late else f"exit {code}"
        why = f"{how}: {self.why()}" if late or code else ""
        result.check(f"{prefix}: ended by itself", not late and code == 0, why)
        result.save()
        return facts


def table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows in columns; the first is the head."""
    widths = [max(len(line[column]) for line in rows) for column in range(len(rows[0]))]
    for line in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip(), flush=True)


def verdicts(result: Result) -> None:
    """Prints the checks, as the job's last table."""
    print()
    table([("result", "what", "detail")])
    for entry in result.data["checks"]:
        print(
            f"{'ok  ' if entry['passed'] else 'FAIL'} {entry['what']}  {' '.join(entry['detail'].split())[:110]}",
            flush=True,
        )


if __name__ == "__main__":
    print("childrun is a module; the jobs import it")
