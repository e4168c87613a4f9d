"""Rows of the deep suites that are about libraries and about another GPU. `deep` is the run, of `deep_job.py`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import time
from typing import Any

import cli
import common
from common import LEFT_MIB, JobError
from deep_libraries import LIBRARIES
from deep_memory import restore_on
from race_memory import Checkpoints

#: Seconds that the driver alone keeps a process off the GPU: threads of its libraries make calls meanwhile.
OFF_S = 1.0


def library(deep: Any, name: str) -> None:
    """A process of a library."""
    missing = importlib.util.find_spec(LIBRARIES[name].NEEDS) is None
    if missing or deep.left_s() < 60:
        deep.result.note(f"{name}: NOT RUN: {'it is not installed' if missing else 'no time is left'}")
        return
    tenant, wanted = f"deep-{name}-{os.getpid()}", deep.args.library_cycles
    child = deep.start(name, name, tenant)
    versions = child.call("hold", 120, gib=deep.args.library_gib)[0]
    deep.result.data["versions"].update(versions)
    most, done, wrong = 0, 0, set()
    while done < wanted and deep.left_s() > 30:
        try:
            most = max(most, deep.cycle(name, tenant, "deep")[1])
        except JobError as error:
            raise JobError(f"cycle {done + 1}: {error}; the process: {child.tail()}") from error
        wrong |= set(child.call("same", 90)[0])
        done += 1
    said = " ".join(f"{library} {version}" for library, version in versions.items())
    what = f"{said}, {deep.args.library_gib:g} GiB: contents and results have the same bits after each of {wanted} deep pauses"
    deep.result.check(what, not wrong and done == wanted, f"{done} done; wrong: {', '.join(sorted(wrong)) or 'none'}")
    deep.result.check(f"{said}: {LEFT_MIB} MiB or less are left after each", most <= LEFT_MIB, f"at most {most} MiB")
    deep.row(name, "deep")
    child.close()


def library_of_driver(deep: Any, name: str) -> None:
    """The same without Sublet, by the driver's own calls."""
    child = deep.start(f"driver-{name}", name, None)
    child.call("hold", 120, gib=1.0)
    wrong, done = set(), 0
    while done < deep.args.library_cycles and deep.left_s() > 30:
        for step in ("lock", "checkpoint", "restore", "unlock"):
            if step == "restore":
                time.sleep(OFF_S)
            told = Checkpoints.step(step, child.pids[0], 30_000)
            if told["code"] != 0:
                raise JobError(f"the driver's {step} number {done + 1} of a process without Sublet returned {told['code']}: {child.why()}")
        wrong |= set(child.call("same", 90)[0])
        done += 1
    what = f"{name} without Sublet: {deep.args.library_cycles} checkpoints by the driver"
    deep.result.check(what, not wrong and done == deep.args.library_cycles, f"{done} done; wrong: {', '.join(sorted(wrong)) or 'none'}")
    child.close()


def other_gpu(deep: Any) -> None:
    """Once: does the driver bring a process back on another GPU? What it says is no verdict on a product that does not ask it."""
    count = len(deep.idle_mib)
    if count < 2:
        deep.result.note("other_gpu: NOT RUN: there is one GPU")
        return
    tenant = f"deep-other-{os.getpid()}"
    child = deep.start("other", "plain", tenant)
    child.call("hold", 60, gib=1.0)
    deep.act("pause", tenant, "--deep")
    changed = {0: 1, 1: 0, **{gpu: gpu for gpu in range(2, count)}}
    ways: dict[str, dict[int, int]] = {"the pair 0 to 1": {0: 1}, "0 and 1 change places": changed, "each GPU to itself": {gpu: gpu for gpu in range(count)}, "the pair 0 to 0": {0: 0}}
    for what, places in ways.items():
        said = restore_on(child.pids[0], places)
        deep.result.note(f"cuCheckpointProcessRestore, {what}: {said}")
        deep.result.data["baseline"][f"restore: {what}"] = said
        if said.startswith("0 "):
            break
    deep.act("resume", tenant)
    now = [used - idle for used, idle in zip(common.used_mib(), deep.idle_mib, strict=True)]
    deep.result.note(f"other_gpu: after the resume {now} MiB are used on the GPUs, contents are {'the same' if child.call('same', 60)[0] else 'WRONG'}")
    child.close()


def under_mps(deep: Any) -> None:
    """A process under MPS is refused by name before anything moves, and is paused plainly. What the driver alone says to it is written down."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or deep.left_s() < 60:
        deep.result.note(f"mps: NOT RUN: {'there is no nvidia-cuda-mps-control' if control is None else 'no time is left'}")
        return
    folder = deep.work / "mps"
    folder.mkdir()
    place = {"CUDA_MPS_PIPE_DIRECTORY": str(folder), "CUDA_MPS_LOG_DIRECTORY": str(folder)}
    subprocess.run([control, "-d"], env={**os.environ, **place}, timeout=20, check=True)
    try:
        tenant = f"deep-mps-{os.getpid()}"
        child = deep.start("mps", "holder", tenant, more=place)
        child.call("hold", 90, gib=1.0)
        told = cli.sublet("pause", tenant, "--deep", timeout_s=30)
        said = cli.say(told)
        deep.result.check("under MPS a deep pause is refused by name", told["exit"] != 0 and "MPS" in said, said)
        deep.act("pause", tenant)
        deep.act("resume", tenant)
        deep.result.check("a process under MPS holds the same after a plain pause", child.call("same", 60)[0]["same"])
        child.close()
        alone = deep.start("driver-mps", "holder", None, more=place)
        alone.call("hold", 90, gib=1.0)
        codes = {step: Checkpoints.step(step, alone.pids[0], 10_000)["code"] for step in ("lock", "checkpoint")}
        deep.result.note(f"mps: without Sublet the driver returned {codes}")
        for step in ("restore", "unlock"):
            Checkpoints.step(step, alone.pids[0], 10_000)
        alone.close()
    finally:
        common.stop_children()
        subprocess.run([control], input="quit -t 5\n", text=True, env={**os.environ, **place}, timeout=20, check=False)
