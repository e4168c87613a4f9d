"""What a run leaves: one JSON document with everything that the page shows."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional

VERSION = 1


@dataclasses.dataclass
class Run:
    """One mode. All times are seconds on the run's own clock."""

    mode: str
    handover: str
    #: `phase` (start, train, to_generator, handover, generate, to_trainer), `step`, `begin_s`, `end_s`; and `leaves` and `arrives`,
    #: a pause and a return of the trainer during `generate`, and `generator_leaves` and `generator_arrives`, of the generator during `train`;
    #: and `rest` and `end_rest`, deep pauses of both and their resumes.
    phases: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    #: `step`, `reward`, `loss`, `fingerprint` of the weights before it, `tokens`.
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    #: `at_s`, `point`, `held`: bytes by GPU, tenant and kind.
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    #: By uuid: `device`, `name`, `total_bytes`.
    gpus: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    #: What `sublet` said of each pause, resume and swap: `step`, `action`, `tenant`, `wall_ms`, `phases` (milliseconds by
    #: name) and `saved_bytes`.
    commands: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    weights: Optional[str] = None
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)
    #: Why it did not come to its end.
    failure: Optional[str] = None
    #: What a tenant of it said when it ran out of device memory.
    shortage: Optional[str] = None


def shortage(logs: Sequence[Path]) -> Optional[str]:
    """The first line of these logs about device memory that ran out."""
    for log in sorted(logs):
        for line in log.read_text(errors="replace").splitlines():
            if re.search(r"out.?of.?memory", line, re.IGNORECASE):
                return line.strip()
    return None


def results(run: Run) -> list[tuple[Any, ...]]:
    """What must be the same in every mode, step by step: of a run that did not come to its end, the steps that are over."""
    steps = [(step["reward"], step["loss"], step["fingerprint"]) for step in run.steps if step["reward"] is not None]
    return steps if run.failure is not None else [*steps, ("weights", run.weights)]


def comparable(runs: list[Run]) -> list[Run]:
    """Those that have something to compare."""
    return [run for run in runs if results(run)]


def difference(runs: list[Run]) -> Optional[str]:
    """Where two runs differ in rewards, losses or weights, as far as both came; None where they do not."""
    # The first is one that came to its end, where there is one.
    compared = sorted(comparable(runs), key=lambda run: run.failure is not None)
    for run in compared[1:]:
        first, other = results(compared[0]), results(run)
        if run.failure is None and len(first) != len(other):
            return f"'{run.mode}' has {len(other) - 1} steps, '{compared[0].mode}' {len(first) - 1}"
        for step, (expected, found) in enumerate(zip(first, other)):
            if expected != found:
                what = f"step {step}" if step < len(run.steps) else "the end"
                return f"'{run.mode}' differs from '{compared[0].mode}' at {what}: {found} instead of {expected}"
    return None


def document(runs: list[Run], options: dict[str, Any], versions: dict[str, str]) -> dict[str, Any]:
    """Everything, as it is written."""
    found = difference(runs)
    compared = [run.mode for run in comparable(runs)]
    return {
        "version": VERSION,
        "options": options,
        "versions": versions,
        "compared": len(compared),
        "compared_modes": compared,
        "identical": found is None if len(compared) > 1 else None,
        "difference": found,
        "runs": [dataclasses.asdict(run) for run in runs],
    }


def write(path: Path, written: dict[str, Any]) -> None:
    """Writes it, whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(written, separators=(",", ":")) + "\n")
    part.replace(path)
