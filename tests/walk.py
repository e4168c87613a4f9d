"""How many files and functions of the product does a command run? `cargo xtask walk`.

Two ranks of one tenant and the `sublet` command run under valgrind's callgrind on the simulated driver: a pause and a
resume, and `sublet switch` between two tenants of one rank each, of which the command alone counts. A file counts if
one of its instructions ran; functions include what the compiler makes for generics and drops. It needs valgrind.
"""

from __future__ import annotations

import collections
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUBLET, PRELOAD = (os.environ[f"SUBLET_TEST_{name}"] for name in ("BIN", "PRELOAD"))
CALLGRIND = ["valgrind", "-q", "--tool=callgrind", "--compress-strings=no", "--compress-pos=no"]
OWN = re.compile(r"(?:^|/)((?:vmm-pool|tenants|adapters|ffi)(?:/[a-z-]+)?/src/.*)$")
STEP_S = 120


class Rank:
    """A rank that is looked at only while it is told to be."""

    def __init__(self, work: Path, tenant: str, rank: int, ranks: int, device: int) -> None:
        folder = work / tenant
        folder.mkdir(exist_ok=True)
        self.out = work / f"{tenant}{rank}.out"
        program = [str(work / "rank"), "--rank", rank, "--ranks", ranks, "--device", device, "--statics", 2]
        program += ["--tensor-mib", 4, "--scratch-mib", 4, "--dir", folder, "--nccl", work / "libnccl.so.2"]
        command = [*CALLGRIND, "--instr-atstart=no", f"--callgrind-out-file={self.out}", *map(str, program)]
        env = {**os.environ, "SUBLET_TENANT": tenant, "LD_PRELOAD": PRELOAD}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True, bufsize=1)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")

    def answer(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise SystemExit(f"rank {self.process.args} ended early")

    def control(self, *words: str) -> None:
        subprocess.run(["callgrind_control", *words, str(self.process.pid)], check=True, capture_output=True, timeout=STEP_S)


def start(ranks: list[Rank]) -> list[Rank]:
    for rank in ranks:
        rank.answer()
    for line in ("connect", "step"):
        for rank in ranks:
            rank.say(line)
        for rank in ranks:
            rank.answer()
    return ranks


def ran(outputs: list[Path]) -> tuple[int, int]:
    """The files and functions of the product with costs in callgrind's outputs."""
    functions: dict[str, set[str]] = collections.defaultdict(set)
    for path in outputs:
        file = function = ""
        is_call = False
        for line in path.read_text(errors="replace").splitlines():
            if line[:3] in ("fl=", "fi=", "fe="):
                file = line[3:]
            elif line.startswith("fn="):
                function = line[3:]
            elif line.startswith("calls="):
                is_call = True
            elif line[:1].isdigit() or line[:1] in ("+", "-", "*"):
                found = None if is_call else OWN.search(file)
                if found and "vmm-pool/sim/" not in file:
                    functions[found[1]].add(function)
                is_call = False
    return len(functions), sum(map(len, functions.values()))


def command(work: Path, name: str, *words: str) -> Path:
    out = work / f"command-{name}.out"
    subprocess.run([*CALLGRIND, f"--callgrind-out-file={out}", SUBLET, *words], check=True, capture_output=True, timeout=STEP_S)
    return out


def inside(work: Path) -> None:
    ranks = start([Rank(work, "job", rank, 2, rank) for rank in range(2)])
    for name in ("pause", "resume"):
        for rank in ranks:
            rank.control("-i", "on")
            rank.control("-z")
        outputs = [command(work, name, name, "job")]
        for rank in ranks:
            rank.control("-d", name)
            rank.control("-i", "off")
            dumps = sorted(work.glob(f"{rank.out.name}.*"), key=lambda path: path.stat().st_mtime)
            outputs.append(dumps[-1])
        print("{}, two ranks and the command: {} files, {} functions".format(name, *ran(outputs)), flush=True)
    pair = [start([Rank(work, tenant, 0, 1, 0)])[0] for tenant in ("one", "two")]
    subprocess.run([SUBLET, "pause", "one"], check=True, capture_output=True, timeout=STEP_S)
    print("switch, the command alone: {} files, {} functions".format(*ran([command(work, "switch", "switch", "one")])))
    for rank in [*ranks, *pair]:
        rank.process.kill()
        rank.process.wait()


def main() -> None:
    if len(sys.argv) > 1:
        inside(Path(sys.argv[1]))
        return
    if not shutil.which("valgrind"):
        raise SystemExit("walk: valgrind is missing; the system's packages have it: apt-get install valgrind")
    with tempfile.TemporaryDirectory() as name:
        work, programs = Path(name), ROOT / "tests" / "programs"
        for flags, source, target in ((["-pthread"], "rank.c", "rank"), (["-shared", "-fPIC"], "nccl_like.c", "libnccl.so.2")):
            build = ["cc", "-O2", "-D_GNU_SOURCE", *flags, str(programs / source), "-o", str(work / target), "-ldl"]
            subprocess.run(build, check=True)
        again = [SUBLET, "simulate", "--gpus", "2", "--memory", "256MiB", "--", sys.executable, __file__, name]
        raise SystemExit(subprocess.run(again, check=False).returncode)


if __name__ == "__main__":
    main()
