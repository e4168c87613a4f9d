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
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import common
import subletapi
from common import JobError, Result


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


def losses(log_path: Path) -> list[str]:
    """The loss of each step so far, as printed: hexadecimal, so that equal text is equal bits."""
    text = log_path.read_text(errors="replace") if log_path.exists() else ""
    return re.findall(r"step \d+ loss (\S+)", text)


def start(args: Any, work: Path, name: str, tenant: str | None) -> tuple[Any, Path]:
    """One torchrun of the script, its output in a file."""
    torchrun = shutil.which("torchrun") or str(Path(sys.executable).parent / "torchrun")
    gpus = args.gpus or len(list(Path("/dev").glob("nvidia[0-9]*"))) or 1
    command = [torchrun, "--standalone", "--nproc-per-node", str(gpus), str(find_script(args.script))]
    command += ["--steps", str(args.steps)]
    log_path = work / f"{name}.log"
    return common.spawn(subletapi.tenant_command(tenant, command), common.child_env(), log_path), log_path


def wait_for_steps(child: Any, log_path: Path, count: int, timeout_s: float) -> None:
    """Waits until `count` steps are printed; a job that ended early is an error with its last lines."""

    def ready() -> bool:
        if len(losses(log_path)) >= count:
            return True
        if child.poll() is not None:
            tail = log_path.read_text(errors="replace")[-1500:]
            raise JobError(f"the job ended with {child.returncode} after {len(losses(log_path))} steps: {tail}")
        return False

    common.wait_until(f"step {count} in {log_path.name}", ready, timeout_s)


def pause_once(args: Any, result: Result, tenant: str, tries_max: int = 6) -> bool:
    """Pauses, at another moment each time until it succeeds; records tries and times."""
    for attempt in range(tries_max):
        time.sleep(0.037 * (attempt + 1))
        told = subletapi.sublet("pause", tenant, "--timeout", f"{args.pause_timeout:.0f}s", "--json", timeout_s=60)
        result.data.setdefault("told", []).append(told)
        if told["exit"] == 0:
            result.sample("tries", attempt + 1)
            result.sample("pause_s", told["wall_s"])
            return True
        common.log(f"try {attempt}: {subletapi.say(told)[:300]}")
    return False


def body_of(args: Any):
    """The job."""

    def body(result: Result, work: Path) -> None:
        plain, plain_log = start(args, work, "plain", None)
        wait_for_steps(plain, plain_log, args.steps, 90)
        plain.wait(timeout=30)
        expected = losses(plain_log)
        result.data["baseline"] = {"steps": len(expected), "final_loss": expected[-1]}
        tenant = f"train-{os.getpid()}"
        hooked, hooked_log = start(args, work, "hooked", tenant)
        for index in range(args.pauses):
            wait_for_steps(hooked, hooked_log, (index + 1) * args.steps // (args.pauses + 2), 90)
            if not result.check(f"pause {index} from outside", pause_once(args, result, tenant)):
                break
            before = len(losses(hooked_log))
            shown = subletapi.sublet("ps", timeout_s=30)
            result.data["ps_while_paused"] = shown.get("stdout", "")
            time.sleep(0.3)
            result.check(f"no step while paused {index}", len(losses(hooked_log)) == before)
            told = subletapi.sublet("resume", tenant, "--json", timeout_s=60)
            result.sample("resume_s", told["wall_s"])
            result.check(f"resume {index}", told["exit"] == 0, subletapi.say(told) if told["exit"] else "")
        wait_for_steps(hooked, hooked_log, args.steps, 90)
        hooked.wait(timeout=30)
        got = losses(hooked_log)
        same = got == expected
        first = next((i for i, pair in enumerate(zip(got, expected)) if pair[0] != pair[1]), None)
        result.check("losses identical to the run that was never paused", same, f"{len(got)} steps, first other {first}")
        result.check("the job ended well", hooked.returncode == 0, f"exit {hooked.returncode}")

    return body


if __name__ == "__main__":
    arguments = parse(sys.argv[1:])
    sys.exit(common.run_job(arguments, "train_torchrun", body_of(arguments)))
