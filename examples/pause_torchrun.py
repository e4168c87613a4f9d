"""A torchrun job that knows nothing of Sublet is paused from outside, at any instant, and goes on where it stood.

    python examples/pause_torchrun.py --nproc-per-node 2    # needs GPUs and PyTorch

Starts `examples/train.py` under torchrun as tenant `train`, pauses it after a few steps, shows what is left on the GPUs
meanwhile, resumes it, and compares its losses with those of a second run that nobody pauses: they are the same, bit for bit.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import stage

STEPS, PAUSED_AFTER = 40, 10


def job(ranks: str, tenant: bool) -> subprocess.Popen[str]:
    """The training job, which prints a line for each step."""
    script = str(Path(__file__).with_name("train.py"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, script]
    command += ["--steps", str(STEPS), "--width", "2048"]
    under = [*stage.SUBLET, "run", "--tenant", "train", "--"] if tenant else []
    return subprocess.Popen([*under, *command], stdout=subprocess.PIPE, text=True)


def losses(running: subprocess.Popen[str], count: int) -> list[str]:
    """The losses of the next `count` steps."""
    found = []
    for line in running.stdout:
        if line.startswith("step "):
            found.append(line.split()[3])
        if len(found) == count:
            return found
    raise SystemExit(f"the job has ended after {len(found)} steps")


def main() -> None:
    stage.begin(None)
    import sublet

    if importlib.util.find_spec("torch") is None:
        stage.leave("needs PyTorch: pip install torch")
    ranks = sys.argv[sys.argv.index("--nproc-per-node") + 1] if "--nproc-per-node" in sys.argv else "1"
    running = job(ranks, tenant=True)
    found = losses(running, PAUSED_AFTER)
    report = sublet.Tenant("train").pause()
    print(f"paused after {PAUSED_AFTER} steps: {report.outcome}")
    left = [entry for member in sublet.Tenant("train").stats()["members"] for entry in member["pool"]["devices"]]
    print("left on the GPUs, by reason:", json.dumps([device["pinned"] for device in left]))
    sublet.Tenant("train").resume()
    found += losses(running, STEPS - PAUSED_AFTER)
    running.wait(300)
    plain = job(ranks, tenant=False)
    same = found == losses(plain, STEPS)
    plain.wait(300)
    print(f"{STEPS} losses are the same" if same else "losses DIFFER")
    raise SystemExit(0 if same else 1)


if __name__ == "__main__":
    main()
