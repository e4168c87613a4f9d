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
import time
from pathlib import Path
from typing import Any

import common
import larger_job
import runner
from common import MIB, JobError, Result
from suite import Row, Suite, main, options, role_of, words_of

#: Steps before the first that counts: the state is made, and the order is learnt.
WARM = 3


# ---------------------------------------------------------------- in a rank


def model_of(torch: Any, layers: int, width: int) -> Any:
    """A stack of feed-forward layers with what they are given added."""

    class Layer(torch.nn.Module):
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


class Ranks(Suite):
    """One row after the other, each with the GPUs to itself."""

    HEAD = ("row", "step s", "remaps/s, all ranks", "us a remap", "p99 us", "GB a rank")
    END_S = 5.0
    FAILED = "{}: ran"

    def train(self, row: str, world: int, pages: str, chunk_mib: int) -> None:
        """One training; what its ranks say goes into the record."""
        args, result = self.args, self.result
        how: dict[str, Any] = {"env": {"PYTHONWARNINGS": "ignore"}, "launcher": "launch", "life_s": self.left_s() + 20}
        if pages != "nothing":
            how |= {"tenant": f"larger-ranks-{row}-{os.getpid()}", "sites": [runner.package(self.work, "sublet")]}
        ranks = runner.Ranks(self.work, row, world, [__file__, "--role", "rank"], **how)
        try:
            shape = {name: getattr(args, name) for name in ("steps", "layers", "width", "tokens", "frames")}
            add(row, ranks.call("train", self.left_s(), pages=pages, chunk_mib=chunk_mib, **shape), result)
        finally:
            ranks.close()
        compare(row, pages != "nothing", result)

    def show(self) -> None:
        """The figures, one line a row."""
        facts = self.data.get("facts")
        if not facts:
            raise JobError("no row has run")
        for row, found in facts.items():
            cells = (("step_s", "median", ".4f"), ("remaps_a_second", "median", ".0f"), ("remap_us", "median", ".0f"), ("remap_us", "p99", ".0f"))
            values = [(common.summarise(self.samples(f"{row}_{what}"))[figure], how) for what, figure, how in cells]
            text = ["-" if value is None else format(value, how) for value, how in values]
            self.table.append((row, *text, f"{max(found['device_bytes']) / 1e9:.1f}"))
        super().show()


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


def compare(row: str, pages: bool, result: Result) -> None:
    """Is a row as `plain`, bit for bit?"""
    facts = result.data["facts"]
    if pages:
        moved = result.data["samples"].get(f"{row}_remaps_a_second", [])
        result.check(f"{row}: memory was paged in each step", bool(moved) and min(moved) > 0)
    same, found = facts.get("plain"), facts[row]
    if row == "plain" or same is None or len(same["losses"]) != len(found["losses"]):
        return
    for what in ("losses", "weights"):
        result.check(f"{row}: {what} of all ranks, bit for bit", found[what] == same[what])


def row_of(name: str, world: int, pages: str, chunk_mib: int) -> Row:
    """A training with so many ranks, what it pages, and its chunks in MiB."""
    return Row(name, lambda ranks: ranks.train(name, world, pages, chunk_mib), gpus_min=world, least_s=15)


ROWS = (
    row_of("plain", 2, "nothing", 0),
    row_of("two", 2, "optimizer", 64),
    row_of("two_256", 2, "optimizer", 256),
    row_of("one", 1, "optimizer", 64),
    row_of("weights", 2, "weights", 64),
)

parse = options(
    __doc__, 125, steps=15, layers=(16, "of 33 million parameters each"), width=2048, tokens=(8192, "of each rank, a step"),
    frames=(1024, "MiB of device memory for the state of a rank"), rows=(",".join(row.name for row in ROWS), "rows to run, by comma"),
    role=role_of("rank"),
)


def body(args: Any, result: Result, work: Path) -> None:
    """The rows that are named."""
    suite = Ranks(ROWS, args, result, work)
    there = common.gpus()["count"] or 0
    suite.gpus = min(there, args.gpus) if args.gpus else there
    suite.run([row for row in ROWS if row.name in words_of(args.rows)])


if __name__ == "__main__":
    main(parse, "larger_ranks", body, {"rank": {"train": train}})
