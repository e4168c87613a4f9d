"""Do two ranks that page on two GPUs disturb each other? How often does the driver map memory again, and what does it cost?

A stack of feed-forward layers of some 0.5 billion parameters trains by stock `DistributedDataParallel` and stock AdamW, one
process a GPU. The state of the optimizer, 4.3 GB a rank, goes through frames by `sublet.paged` after each backward pass.

| row | ranks | what is paged | chunks |
| --- | --- | --- | --- |
| `plain` | 2 | nothing, and no Sublet | |
| `two` | 2 | the optimizer's state | 64 MiB |
| `two_256` | 2 | the same | 256 MiB |
| `one` | 1 | the same, while no other rank pages | 64 MiB |
| `weights` | 2 | the parameters, in frames of a third, while NCCL sums up gradients | 64 MiB |

Losses of each rank and the bits of all weights are compared with those of `plain`. A *remap* is one chunk that gets a frame: the
frame is unmapped from the chunk before, mapped for this one, and made accessible.

Bound: 4.3 GB go each way in a step. At 50 GB/s that is 0.09 s, so a rank remaps some 750 times a second. A driver that does one
remap after the other for the whole machine shows it as a higher cost of one in `two` than in `one`.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import common
import larger_job
import runner
from common import MIB, JobError, Result

#: Each with its ranks, what it pages, and its chunks in MiB.
ROWS = {
    "plain": (2, "nothing", 0),
    "two": (2, "optimizer", 64),
    "two_256": (2, "optimizer", 256),
    "one": (1, "optimizer", 64),
    "weights": (2, "weights", 64),
}
#: Steps before the first that counts: the state is made, and the order is learnt.
WARM = 3


def parse(argv: list[str]) -> Any:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=125)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--layers", type=int, default=16, help="of 33 million parameters each")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--tokens", type=int, default=8192, help="of each rank, a step")
    parser.add_argument("--frames", type=int, default=1024, help="MiB of device memory for the state of a rank")
    parser.add_argument("--rows", default=",".join(ROWS), help="rows to run, by comma")
    parser.add_argument("--role", action="store_true", help="used by the job itself")
    return parser.parse_args(argv)


# ---------------------------------------------------------------- in a rank


def model_of(torch: Any, layers: int, width: int) -> Any:
    """A stack of feed-forward layers with what they are given added."""

    class Layer(torch.nn.Module):
        """One of them."""

        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.LayerNorm(width)
            self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

        def forward(self, given: Any) -> Any:
            return given + self.down(torch.nn.functional.gelu(self.up(self.norm(given))))

    torch.manual_seed(1)
    return torch.nn.Sequential(*[Layer() for _ in range(layers)])


def counts() -> dict[str, int]:
    """What the pager of this process has done."""
    import sublet

    found = sublet.report()[0]
    return {name: found[name] for name in ("remaps", "remap_us", "exchanges", "in_bytes", "out_bytes")}


def train(pages: str, chunk_mib: int, steps: int, layers: int, width: int, tokens: int, frames: int) -> dict[str, Any]:
    """A training of this rank."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch
    from torch.nn.parallel import DistributedDataParallel

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with torch.device("cuda"):
        model = model_of(torch, layers, width)
    if pages == "weights":
        import sublet

        total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        model = sublet.paged(model, frames=total // 3)
        torch.cuda.empty_cache()
    # All ranks have made the same weights.
    parallel = DistributedDataParallel(model, device_ids=[rank], gradient_as_bucket_view=True, init_sync=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if pages == "optimizer":
        import sublet
        from sublet import _paging

        _paging._CHUNK_BYTES = chunk_mib * MIB
        optimizer = sublet.paged(optimizer, frames=frames * MIB)
    generator = torch.Generator("cuda").manual_seed(2 + rank)
    data = [torch.randn(tokens, width, device="cuda", generator=generator) for _ in range(2)]
    losses, samples = [], []
    for step in range(steps):
        batch = data[step % len(data)]
        torch.distributed.barrier()
        torch.cuda.synchronize()
        before, began = counts() if pages != "nothing" else {}, time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = (parallel(batch) - batch.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        sample: dict[str, Any] = {"step_s": time.perf_counter() - began}
        if before:
            after = counts()
            sample |= {name: after[name] - value for name, value in before.items()}
        if step >= WARM:
            samples.append(sample)
        losses.append(float(loss))
    free, total_bytes = torch.cuda.mem_get_info()
    return {
        "losses": losses,
        "weights": larger_job.bits_of(torch, model),
        "samples": samples,
        "device_bytes": total_bytes - free,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "versions": runner.versions(),
    }


# ---------------------------------------------------------------- the job


def run_row(row: str, args: Any, result: Result, work: Path, limit_s: float) -> None:
    """One training; what its ranks say goes into the record."""
    world, pages, chunk_mib = ROWS[row]
    how: dict[str, Any] = {"env": {"PYTHONWARNINGS": "ignore"}, "life_s": limit_s + 20}
    if pages != "nothing":
        how |= {"tenant": f"larger-ranks-{row}-{os.getpid()}", "sites": [runner.package(work, "sublet")]}
    ranks = runner.Ranks(work, row, world, [__file__, "--role"], **how)
    try:
        shape = {name: getattr(args, name) for name in ("steps", "layers", "width", "tokens", "frames")}
        told = ranks.call("train", limit_s, pages=pages, chunk_mib=chunk_mib, **shape)
        add(row, told, result)
    finally:
        ranks.close()


def add(row: str, told: list[dict[str, Any]], result: Result) -> None:
    """Adds what the ranks of a row have said."""
    result.data["versions"].update(told[0].pop("versions"))
    facts = result.data.setdefault("facts", {})
    facts[row] = {name: [each[name] for each in told] for name in ("losses", "weights", "device_bytes", "parameters")}
    for each in told:
        for sample in each["samples"]:
            result.sample(f"{row}_step_s", sample["step_s"])
            if sample.get("remaps"):
                result.sample(f"{row}_remap_us", sample["remap_us"] / sample["remaps"])
                result.sample(f"{row}_rank_remaps_a_second", sample["remaps"] / sample["step_s"])
    together = list(zip(*(each["samples"] for each in told), strict=True))
    for step in together if all("remaps" in sample for step in together for sample in step) else []:
        longest = max(sample["step_s"] for sample in step)
        result.sample(f"{row}_remaps_a_second", sum(sample["remaps"] for sample in step) / longest)
    result.save()


def compare(row: str, result: Result) -> None:
    """Is a row as `plain`, bit for bit?"""
    facts = result.data["facts"]
    pages = ROWS[row][1] != "nothing"
    if pages:
        moved = result.data["samples"].get(f"{row}_remaps_a_second", [])
        result.check(f"{row}: memory was paged in each step", bool(moved) and min(moved) > 0)
    same, found = facts.get("plain"), facts[row]
    if row == "plain" or same is None or len(same["losses"]) != len(found["losses"]):
        return
    for what in ("losses", "weights"):
        result.check(f"{row}: {what} of all ranks, bit for bit", found[what] == same[what])


def body(args: Any, result: Result, work: Path) -> None:
    """One row after the other, each with the GPUs to itself."""
    there = common.gpus()["count"] or 0
    count = min(there, args.gpus) if args.gpus else there
    began = time.monotonic()
    for row in (row for row in ROWS if row in args.rows.split(",")):
        left = args.deadline - (time.monotonic() - began) - 5
        if ROWS[row][0] > count or left < 15:
            result.note(f"{row}: NOT RUN: {f'{count} GPUs' if ROWS[row][0] > count else 'no time is left'}")
            continue
        try:
            run_row(row, args, result, work, left)
        except JobError as error:
            result.check(f"{row}: ran", False, str(error))
            continue
        compare(row, result)
    if not result.data.get("facts"):
        raise JobError("no row has run")
    runner.verdicts(result)
    print()
    show(result)


def show(result: Result) -> None:
    """The figures, one line a row."""
    lines: list[tuple[str, ...]] = [("row", "step s", "remaps/s, all ranks", "us a remap", "p99 us", "GB a rank")]
    for row, facts in result.data["facts"].items():
        step, rate, cost = (
            common.summarise(result.data["samples"].get(f"{row}_{what}", []))
            for what in ("step_s", "remaps_a_second", "remap_us")
        )
        figures = [(step["median"], ".4f"), (rate["median"], ".0f"), (cost["median"], ".0f"), (cost["p99"], ".0f")]
        text = ["-" if value is None else format(value, how) for value, how in figures]
        lines.append((row, *text, f"{max(facts['device_bytes']) / 1e9:.1f}"))
    runner.table(lines)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    if options.role:
        runner.serve(runner.connect(), {"train": train})
    sys.exit(common.run_job(options, "larger_ranks", body))
