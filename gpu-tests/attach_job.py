"""Can a program that was not started by `sublet run` be paused?

Two programs import torch and call `sublet.attach()`, one before CUDA is used and one when a tensor is on the device
already. Both then make a tensor of `--gib` GiB and are paused and resumed from outside. What was made after the attach
must leave the device and come back exact; what came before stays, and the report names the library and the bytes.

Bound: 2 GiB over the link, 40 ms each way; the run is two starts of torch, some 20 s.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import Result
from observer import Observer
from suite import main, options, role_of

CYCLES = 3

parse = options(
    __doc__, 90, gib=2.0, role=role_of("early", "late"), tenant=(str, "used by the job itself"),
    stop=(Path, "used by the job itself: a file that ends the program"),
)


def program(args: Any) -> None:
    import sublet
    import torch

    count = int(args.gib * common.GIB) // 8
    before = None
    if args.role == "late":
        before = torch.arange(count, dtype=torch.int64, device="cuda:0")
        torch.cuda.synchronize()
        torch.ones(1 << 20, device="cuda:0").sum().item()
    report = sublet.attach(args.tenant)
    said = dataclasses.asdict(report)
    runner.fact("report", said)
    runner.row("attached", sublet.attached() and not said["was_preloaded"])
    states = {Path(str(library["path"])).name: library["state"] for library in said["libraries"]}
    runtime = {name: state for name, state in states.items() if "cudart" in name}
    others = {name: state for name, state in states.items() if state != "hooked"}
    runner.row("every library is hooked", said["launches_are_held"] and not others, str(others or "none is not"))
    reserved = sum(said["reserved_bytes"].values())
    wanted = args.gib * common.GIB if args.role == "late" else 0
    is_said = bool(runtime) and (reserved >= wanted if wanted else reserved == 0)
    detail = f"{runtime}; {reserved >> 20} MiB reserved before"
    runner.row("the report names libcudart and the bytes that came too early", is_said, detail)
    tensor = torch.arange(count, dtype=torch.int64, device="cuda:0").mul_(3)
    product = torch.randn(512, 512, device="cuda:0")
    expected, total = product @ product, int(tensor.sum().item())
    torch.cuda.synchronize()
    runner.fact("ready", True)
    rounds, wrong = 0, 0
    while not args.stop.exists():
        wrong += int(tensor.sum().item()) != total or not torch.equal(product @ product, expected)
        wrong += before is not None and int(before[-1].item()) != count - 1
        rounds += 1
    runner.row("values exact all the time", wrong == 0 and rounds > 0, f"{wrong} of {rounds} wrong")


def case(args: Any, result: Result, work: Path, observer: Observer, when: str) -> None:
    """One program, paused from outside."""
    stop, tenant = work / f"stop-{when}", f"attach-{when}-{os.getpid()}"
    command = [__file__, "--role", when, "--tenant", tenant, "--stop", str(stop)]
    command += ["--gib", str(args.gib), "--deadline", "60"]
    child = runner.Child(work, when, command, sites=[runner.package(work, "sublet")])
    try:
        child.wait_fact("ready", 45)
    except common.JobError as error:
        child.finish(result, 5)
        result.check(f"{when}: the program attaches and starts", False, str(error))
        return
    for cycle in range(CYCLES):
        before = observer.free()[0]
        for action in ("pause", "resume"):
            told = cli.sublet(action, tenant, "--json", timeout_s=30)
            result.sample(f"{when}_{action}_s", told["wall_s"])
            passed = told["exit"] == 0
            if action == "pause":
                freed = observer.free()[0] - before
                result.sample(f"{when}_freed_mib", freed / common.MIB)
                passed = passed and freed >= 0.98 * args.gib * common.GIB
            detail = "" if passed else f"{freed / common.MIB:.0f} MiB freed; {cli.say(told)}"
            result.check(f"{when}: {action} {cycle}", passed, detail)
    stop.touch()
    child.finish(result, 25)


def body(args: Any, result: Result, work: Path) -> None:
    """Both programs."""
    observer = Observer(work)
    result.machine(observer.info)
    common.touch_host_memory(2 * args.gib)
    for when in ("early", "late"):
        case(args, result, work, observer, when)
    observer.close()
    runner.verdicts(result)


if __name__ == "__main__":
    main(parse, "attach", body, {"early": program, "late": program})
