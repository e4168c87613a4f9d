"""What a run is told."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Optional

#: Hidden width, layers, heads, key-value heads, inner width. All have a vocabulary of 512: bytes, and special tokens.
SHAPES = {
    "tiny": (64, 2, 4, 2, 128), "0.5b": (896, 24, 14, 2, 4864), "1.5b": (1536, 28, 12, 2, 8960), "7b": (3584, 28, 28, 4, 18944),
}  # fmt: skip
#: Of a model; and what a prompt takes of them.
POSITIONS, PROMPT = 4096, 18
MODE_NAMES = ("sublet", "cpu", "keep-both", "restart", "destroy-groups")


@dataclasses.dataclass(frozen=True)
class Options:
    """Checked, with defaults filled in."""

    simulate: bool
    modes: list[str]
    handover: str
    gpus: int
    steps: int
    seed: int
    tokens: int
    generations: int
    micro_batch: int
    shape: str
    kv_gib: float
    device: str
    deadline_s: float
    sample_s: float
    out: Path
    shm: Path
    gpu_mib: int
    rest_every: int


def parser(epilog: str) -> argparse.ArgumentParser:
    """All options."""
    made = argparse.ArgumentParser(
        prog="rl", description="GRPO: trainer and generator by turns on the same GPUs.", epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = made.add_argument
    add("--mode", "--modes", dest="modes", default="sublet", help=f"by comma, of {', '.join(MODE_NAMES)}; or all")
    add("--handover", choices=["ipc", "host"], default="ipc", help="CUDA IPC, or the bytes that the paused trainer has saved")
    add("--simulate", action="store_true", help="simulated GPUs and memory that stands for weights: no PyTorch, no GPU")
    add("--gpus", type=int, default=1, help="a process of each tenant on each")
    add("--steps", type=int, help="of the trainer (20; 12 with --simulate)")
    add("--shape", choices=SHAPES, default="tiny", help="size of the model; its weights are random")
    add("--generations", type=int, default=16, help="completions a step and GPU, all of one prompt")
    add("--micro-batch", type=int, help="completions that the trainer computes gradients of together (all of a step's)")
    add("--tokens", type=int, help="of each completion (192; 96 with --simulate)")
    add("--kv-gib", type=float, default=1.0, help="what the generator's KV cache takes on each GPU")
    add("--rest-every", type=int, default=0, help="in mode sublet, both tenants are paused deep after each so many steps, and resumed (never)")
    add("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: no mode sublet, and hand-over by a file")
    add("--seed", type=int, default=1)
    add("--deadline", type=float, default=600.0, help="most seconds of any wait")
    add("--gpu-mib", type=int, default=128, help="what a simulated GPU has; 122 hold both tenants")
    add("--sample-s", type=float, help="seconds between looks at the memory (0.25)")
    add("--out", type=Path, default=Path("rl_grpo_out"), help="folder for rl_grpo.json, rl_grpo.html and logs")
    add("--shm", type=Path, default=Path("/dev/shm"), help="folder in memory, for --handover host")
    return made


def parse(argv: Optional[Sequence[str]], epilog: str) -> Options:
    """Options, or the exit of argparse with code 2 that says what is wrong."""
    made = parser(epilog)
    given = made.parse_args(argv)
    modes = list(MODE_NAMES) if given.modes == "all" else [mode for mode in given.modes.split(",") if mode]
    for mode in modes:
        if mode not in MODE_NAMES:
            made.error(f"there is no mode '{mode}': use all, or some of {', '.join(MODE_NAMES)}")
    if not modes or len(set(modes)) < len(modes):
        made.error("--modes names each mode once, and at least one")
    steps = given.steps if given.steps is not None else (12 if given.simulate else 20)
    tokens = given.tokens if given.tokens is not None else (96 if given.simulate else 192)
    sample_s = given.sample_s if given.sample_s is not None else 0.25
    counts = {"--gpus": given.gpus, "--steps": steps, "--tokens": tokens, "--deadline": given.deadline, "--sample-s": sample_s}
    counts["--gpu-mib"] = given.gpu_mib
    for name, value in counts.items():
        if not value > 0:
            made.error(f"{name} is more than 0, not {value}")
    if given.generations < 2:
        made.error("--generations is at least 2: GRPO compares the completions of a prompt")
    micro_batch = given.micro_batch if given.micro_batch is not None else given.generations
    if micro_batch < 1 or given.generations % micro_batch:
        made.error(f"--micro-batch divides --generations, {given.generations}: {micro_batch} does not")
    if tokens > POSITIONS - PROMPT and not given.simulate:
        most = f"a model has {POSITIONS} positions, of which a prompt takes {PROMPT}"
        made.error(f"--tokens is at most {POSITIONS - PROMPT}, not {tokens}: {most}")
    if given.rest_every < 0:
        made.error(f"--rest-every is 0 or more, not {given.rest_every}")
    if given.kv_gib < 0:
        made.error(f"--kv-gib is 0 or more, not {given.kv_gib}")
    if given.device == "cpu" and not given.simulate:
        if "sublet" in modes or given.handover == "ipc":
            made.error("--device cpu has no GPU to pause or share: use --handover host, and another mode than sublet")
    return Options(
        simulate=given.simulate, modes=modes, handover=given.handover, gpus=given.gpus, steps=steps, seed=given.seed,
        tokens=tokens, generations=given.generations, micro_batch=micro_batch, shape=given.shape, kv_gib=given.kv_gib,
        device=given.device, deadline_s=given.deadline, sample_s=sample_s, out=given.out, shm=given.shm,
        gpu_mib=given.gpu_mib, rest_every=given.rest_every,
    )  # fmt: skip
