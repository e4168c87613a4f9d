"""Reinforcement learning by turns: what does a step lose to switching, mode by mode, and is what is learned the same?

`benchmarks/rl`: TRL's GRPO trainer and a generator on the same GPUs, `--steps` steps in each of its
modes from the same seeds. Rewards, losses and weights must be identical in all modes, and the generator's weights those of
the trainer in every step. The record has the figures of each mode; `rl_grpo.json` and the page `rl_grpo.html` lie next to it.

Bound: 0.5B in bf16 with Adam are some 4 GB to save and restore, 0.15 s a switch at 55 GB/s, against a step of some 3 s. The
run is a start of torch for each tenant and mode, and one a step in mode `restart`: with all five modes some 15 minutes.

`--too-large` names modes that cannot hold both jobs on the GPU: the result of such a mode is that a tenant runs out of memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import common
import runner
from common import JobError, Result
from suite import main, options

#: What a run needs in addition to torch and transformers; the bundle carries a wheel where it is not installed.
PACKAGES = ("sublet", "trl", "datasets", "dill", "multiprocess")
#: What the run is given to write its record once it is told to end; the job keeps 30 s behind its wait.
END_S = 15.0
FIGURES = ("lost_share", "step_s", "switch_s", "leaves_s", "arrives_s", "generator_leaves_s", "generator_arrives_s", "left_bytes", "handover_peak_bytes", "kv_tokens_free", "tokens_per_s", "host_bytes", "rests", "rest_s", "end_rest_s", "rest_left_mib")

parse = options(
    __doc__, 1165, modes=("all", "by comma, as of rl/run.py"), shape="0.5b", handover="ipc", kv_gib=20.0, steps=20, tokens=192,
    generations=16, micro_batch=(int, "all completions of a step by default"),
    rest_every=(0, "deep pauses of both tenants, after each so many steps of mode sublet"),
    too_large=("", "modes, by comma, in which a tenant must run out of device memory"), gpu_mib=(int, "memory of a simulated GPU"),
    simulate=(False, "a rehearsal without GPUs"),
)


def body(args: Any, result: Result, work: Path) -> None:
    """One run."""
    packages = PACKAGES[:1] if args.simulate else PACKAGES
    sites = [runner.package(work, name) for name in packages]
    out = work / "out"
    wait_s = max(30.0, args.deadline - 30)
    command = [sys.executable, str(Path(__file__).resolve().parent / "rl" / "run.py"), "--modes", args.modes, "--handover", args.handover, "--steps", str(args.steps)]
    command += ["--out", str(out), "--gpus", str(args.gpus or 1), "--deadline", str(min(300.0, wait_s))]
    command += ["--simulate"] if args.simulate else ["--shape", args.shape, "--kv-gib", str(args.kv_gib)]
    command += ["--tokens", str(args.tokens), "--generations", str(args.generations)]
    command += ["--micro-batch", str(args.micro_batch)] if args.micro_batch is not None else []
    command += ["--rest-every", str(args.rest_every)]
    command += ["--gpu-mib", str(args.gpu_mib)] if args.gpu_mib is not None else []
    process = runner.Process(work, "rl_grpo", command, sites=sites)
    try:
        common.wait_until("the end of the run", lambda: process.ended, wait_s)
    except JobError:
        # Told to end, it writes what it has of the mode that is under way.
        common.stop_child(process.process, grace_s=END_S)
        raise
    finally:
        for path in sorted(out.glob("*")) if out.exists() else []:
            # What was done by then is kept, and the tenants' own output.
            place = args.out.parent / path.name if path.suffix in (".json", ".html") else work / path.name
            shutil.copy(path, place)
        # Modes that came to their end count, though a later one did not.
        if (out / "rl_grpo.json").is_file():
            take(args, result, json.loads((out / "rl_grpo.json").read_text()))
    if not result.data["checks"]:
        raise JobError(f"the run has written no record: {process.why()}")
    # A run with a mode that fails ends with 1.
    wanted = 1 if args.too_large else 0
    result.check("the run ended by itself", process.process.returncode == wanted, process.why())


def take(args: Any, result: Result, record: dict[str, Any]) -> None:
    """Verdicts, figures and samples of its record; which modes it does not have."""
    result.data["versions"].update(record["versions"])
    result.data["commands"] = {}
    for run in record["runs"]:
        mode = run["mode"]
        if mode in args.too_large.split(","):
            told = run["shortage"]
            result.check(f"{mode}: does not fit, a tenant runs out of device memory", told is not None, told or run["failure"] or "")
        else:
            what = f"{mode}: {args.steps} steps"
            result.check(what, run["failure"] is None and len(run["steps"]) == args.steps, run["failure"] or "")
        result.data["summary"][mode] = {name: run["metrics"][name] for name in FIGURES}
        result.data["commands"][mode] = run["commands"]
        if mode == "sublet" and args.rest_every:
            rests, left = (run["metrics"][name] for name in ("rests", "rest_left_mib"))
            wanted = args.steps // args.rest_every
            result.check(f"{mode}: {wanted} deep pauses of both tenants", rests == wanted, f"{rests} made")
            if not args.simulate:
                result.check(f"{common.LEFT_MIB} MiB or less are left of both tenants in each", left is not None and left <= common.LEFT_MIB, f"at most {left} MiB")
        for phase in run["phases"]:
            result.sample(f"{mode}_{phase['phase']}_s", round(phase["end_s"] - phase["begin_s"], 6))
        for name in ("reward", "loss", "tokens"):
            result.data["samples"][f"{mode}_{name}"] = [step[name] for step in run["steps"]]
    if record["compared"] > 1:
        modes = " and ".join(record["compared_modes"])
        reach = ", as far as each came" if any(run["failure"] is not None for run in record["runs"]) else ""
        what = f"rewards, losses and weights are identical in {modes}{reach}"
        result.check(what, bool(record["identical"]), record["difference"] or "")
    lost = [mode for mode in record["options"]["modes"] if mode not in result.data["summary"]]
    if lost:
        result.check(f"{' and '.join(lost)}: {args.steps} steps", False, "not reached")


if __name__ == "__main__":
    main(parse, "rl", body)
