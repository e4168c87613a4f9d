"""Is an ordinary training script under stock torchrun, paused from outside, the same training?

Runs `torchrun examples/train.py` twice in one go: plain, then under `sublet run`, paused and resumed by the command while
it trains. The losses of both runs must be the same text. A pause may meet ranks in the middle of a collective; it then
says so after its timeout, the job runs on, and the next try comes at another moment. The script reads its loss on every
rank and waits between steps, so most moments are step boundaries; a script that never waits has few of them.
Bound: a pause costs the bytes over the link (about 2 GiB a rank: 40 ms) and NCCL's blocks; starting torchrun twice 20 s.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import cli
import common
from common import JobError, Result
from training_run import TrainingRun, gpu_count


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=150)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--pauses", type=int, default=5)
    parser.add_argument("--pause-timeout", type=float, default=3.0)
    parser.add_argument("--script", type=Path, help="the training script (default: examples/train.py)")
    return parser.parse_args(argv)


def find_script(given: Path | None) -> Path:
    """examples/train.py, in the bundle or in the tree that it was built in."""
    for base in (common.JOBS.parent, *common.JOBS.parents):
        candidate = given or base / "examples" / "train.py"
        if candidate.is_file():
            return candidate
    raise JobError("examples/train.py was not found; name it with --script")


def losses(run: TrainingRun) -> list[str]:
    """The loss of each step so far, as printed: hexadecimal, so that equal text is equal bits."""
    return re.findall(r"step \d+ loss (\S+)", run.log.read_text(errors="replace"))


def pause_once(args: Any, result: Result, tenant: str, tries_max: int = 6) -> bool:
    """Pauses, at another moment each time until it succeeds; records tries and times."""
    for attempt in range(tries_max):
        time.sleep(0.037 * (attempt + 1))
        told = cli.sublet("pause", tenant, "--timeout", f"{args.pause_timeout:.0f}s", "--json", timeout_s=60)
        result.data.setdefault("told", []).append(told)
        if told["exit"] == 0:
            result.sample("tries", attempt + 1)
            result.sample("pause_s", told["wall_s"])
            return True
        common.log(f"try {attempt}: {cli.say(told)[:300]}")
    return False


def body(args: Any, result: Result, work: Path) -> None:
    """The job."""
    script, ranks, arguments = find_script(args.script), gpu_count(args.gpus), ["--steps", str(args.steps)]
    plain = TrainingRun(work, "plain", script, ranks, arguments)
    plain.wait_steps(args.steps, 90)
    plain.wait_end(30)
    expected = losses(plain)
    result.data["baseline"] = {"steps": len(expected), "final_loss": expected[-1]}
    tenant = f"train-{os.getpid()}"
    hooked = TrainingRun(work, "hooked", script, ranks, arguments, tenant=tenant)
    for index in range(args.pauses):
        hooked.wait_steps((index + 1) * args.steps // (args.pauses + 2), 90)
        if not result.check(f"pause {index} from outside", pause_once(args, result, tenant)):
            break
        before = len(losses(hooked))
        shown = cli.sublet("ps", timeout_s=30)
        result.data["ps_while_paused"] = shown.get("stdout", "")
        time.sleep(0.3)
        result.check(f"no step while paused {index}", len(losses(hooked)) == before)
        told = cli.sublet("resume", tenant, "--json", timeout_s=60)
        result.sample("resume_s", told["wall_s"])
        result.check(f"resume {index}", told["exit"] == 0, cli.say(told) if told["exit"] else "")
    hooked.wait_steps(args.steps, 90)
    code = hooked.wait_end(30)
    got = losses(hooked)
    same = got == expected
    first = next((i for i, pair in enumerate(zip(got, expected)) if pair[0] != pair[1]), None)
    result.check("losses identical to the run that was never paused", same, f"{len(got)} steps, first other {first}")
    result.check("the job ended well", code == 0, f"exit {code}")


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    sys.exit(common.run_job(arguments, "train_torchrun", body))
