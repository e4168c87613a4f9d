"""GRPO with trainer and generator as two tenants that take turns on the same GPUs.

Without a GPU and without PyTorch, in under a minute; builds what it needs:

    cargo xtask built --python python3 benchmarks/rl/run.py --simulate --modes sublet,cpu

On a machine with GPUs, with PyTorch, transformers, TRL and the wheel of Sublet installed (nothing is fetched; the model
has random weights, the tokenizer is of bytes, the prompts are made here):

    1 GPU, tiny     python benchmarks/rl/run.py --modes all --shape tiny --kv-gib 1
    1 GPU, 0.5B     python benchmarks/rl/run.py --modes all --shape 0.5b --kv-gib 40
    1 GPU, 1.5B     python benchmarks/rl/run.py --modes all --shape 1.5b --kv-gib 40
    2 GPUs, 1.5B    python benchmarks/rl/run.py --modes all --shape 1.5b --kv-gib 40 --gpus 2
    1 GPU, 7B       python benchmarks/rl/run.py --modes sublet,cpu --shape 7b --kv-gib 60 --micro-batch 4

Each mode trains 20 steps with 16 completions of 192 tokens from the same seeds. Rewards, losses and weights must be the
same in all of them, and the program says whether they are. It writes rl_grpo.json and one page, rl_grpo.html, into --out.
Which mode does what, and what the record says, is in docs/rl-example.md.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional

if __package__ in (None, ""):  # started by its path
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "gpu-lane")]

from rl import page, record, space
from rl.arguments import Options, parse
from rl.conductor import Conductor, Jobs
from rl.problem import Problem

_OUT_BYTES = 64 << 20
#: Sockets and the run directory of the simulation, and what a hand-over from the host writes there.
_SHM_BYTES = 64 << 20
#: Options that a record has.
_SHOWN = ("simulate", "modes", "handover", "gpus", "steps", "seed", "tokens", "generations", "micro_batch", "shape", "kv_gib", "device")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Exit code: 0 when every mode came to its end and all agree; 1 when not; 2 when it could not be started."""
    options = parse(argv, __doc__ or "")
    try:
        if options.simulate or options.device == "cuda":
            _require("sublet", "install the wheel: `cargo xtask wheel`, then `pip install target/wheels/*.whl`")
        options.out.mkdir(parents=True, exist_ok=True)
        _check_space(options)
        # Simulated GPUs are files: they belong in memory.
        folder = options.shm if options.simulate and options.shm.is_dir() else None
        with tempfile.TemporaryDirectory(prefix="rl-grpo-", dir=folder) as place, _own_environment():
            jobs = _jobs(options, Path(place))
            runs = _play(options, jobs, Path(place))
    except (Problem, OSError) as problem:
        print(f"rl: {problem}", file=sys.stderr)
        return 2
    return _tell(options, runs)


@contextlib.contextmanager
def _own_environment() -> Iterator[None]:
    """What the run sets for its commands is gone behind it, with the folders that it names."""
    before = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _require(module: str, how: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise Problem(f"Python finds no '{module}': {how}")


def _check_space(options: Options) -> None:
    from rl.real.jobs import weights_bytes
    from rl.simulated.jobs import WEIGHTS_BYTES

    # Memory of simulated GPUs and saved contents lie there too, as far as they are written.
    devices = 2 * (options.gpu_mib << 20) * options.gpus if options.simulate else 0
    weights = WEIGHTS_BYTES if options.simulate else weights_bytes(options.shape, options.device)
    by_file = weights if options.handover == "host" else 0
    space.check({options.out: _OUT_BYTES, options.shm: _SHM_BYTES + devices + by_file})


def _jobs(options: Options, place: Path) -> Jobs:
    # Two runs on one machine would otherwise pause each other's jobs, whose tenants have the same names.
    run_dir = place / "run"
    run_dir.mkdir(mode=0o700)
    if options.simulate:
        from rl.simulated.jobs import SimulatedJobs

        os.environ["SUBLET_RUN_DIR"] = str(run_dir)
        jobs = SimulatedJobs(options, place)
        os.environ.update(jobs.driver)
        return jobs
    os.environ.setdefault("SUBLET_RUN_DIR", str(run_dir))
    for module in ("torch", "transformers", "trl"):
        _require(module, "pip install torch transformers trl; or --simulate, which needs none of them")
    from rl.real.jobs import RealJobs

    return RealJobs(options)


def _play(options: Options, jobs: Jobs, place: Path) -> list[record.Run]:
    runs = []
    for mode in options.modes:
        work = place / mode
        work.mkdir()
        conductor = Conductor(options, jobs, mode, work)
        run = conductor.play()
        for log in work.glob("*.log"):
            shutil.copy(log, options.out / f"{mode}-{log.name}")
        if run.failure is not None:
            run.shortage = record.shortage(list(work.glob("*.log")))
            print(f"{mode}: {run.failure}", file=sys.stderr, flush=True)
        runs.append(run)
        # After each mode, so that a run that is ended leaves what it has.
        _write(options, runs)
        if conductor.stopped:
            break
    return runs


def _versions(runs: Sequence[record.Run]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    if importlib.util.find_spec("sublet") is not None:
        found["sublet"] = importlib.import_module("sublet").__version__
    for run in runs:
        found.update(run.versions)
    return found


def _write(options: Options, runs: list[record.Run]) -> dict[str, Any]:
    shown = {name: getattr(options, name) for name in _SHOWN}
    written = record.document(runs, shown, _versions(runs))
    record.write(options.out / "rl_grpo.json", written)
    (options.out / "rl_grpo.html").write_text(page.html(written), encoding="utf-8")
    return written


def _tell(options: Options, runs: list[record.Run]) -> int:
    written = _write(options, runs)
    print(f"{options.out / 'rl_grpo.json'} and {options.out / 'rl_grpo.html'} are written")
    if written["identical"]:
        print(f"rewards, losses and weights of {written['compared']} modes are identical")
    elif written["identical"] is False:
        print(f"rl: NOT identical: {written['difference']}", file=sys.stderr)
    failed = any(run.failure is not None for run in runs)
    return 1 if failed or written["identical"] is False else 0


if __name__ == "__main__":
    sys.exit(main())
