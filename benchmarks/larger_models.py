"""Models of `larger` that need more than a GPU has, or most of it, made on the spot with random weights; and what they are compared with.

| row | what runs |
| --- | --- |
| `7b` | training of 6.7 billion parameters: weights (27 GB) in frames of 6 GB, AdamW's moments (54 GB) in 3 GB, the step in backward. With gradients the state takes 108 GB |
| `7b_bound` | the same layers with all state on the GPU: all 32 if they fit; else 4 and 12, from which a step of 32 is extrapolated. And what the link carries |
| `lora14` | a frozen base of 14 billion parameters in bf16 (28 GB) on the GPU, with small trained matrices |
| `lora14_third` | the same, the base in frames of a third |

Bound of `7b`: the larger of two times. Compute: a step takes `a + b * layers`, by the two sizes that fit. The link, which moves both ways
simultaneously: with the best order of exchanges (Belady) each step brings all weights but the frames in forward, the same once more in backward, and all moments but their
frames; and it takes out what was written once. So the step can be no shorter than `in_bytes / link_in` and `out_bytes / link_out`.
"""

from __future__ import annotations

import enum
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import runner
from common import GIB, MIB, Result


@dataclass(frozen=True)
class Shape:
    """Of a model of Llama's architecture."""

    hidden: int
    layers: int
    inner: int
    heads: int
    key_heads: int
    #: What its parameters are made in.
    is_bf16: bool = False


SHAPES = {
    "2b": Shape(2560, 24, 6912, 20, 20),
    "2b16": Shape(2560, 24, 6912, 20, 20, is_bf16=True),
    "7b": Shape(4096, 32, 11008, 32, 32),
    "14b": Shape(5120, 43, 13824, 40, 40, is_bf16=True),
}
VOCABULARY, TOKENS = 32000, 2048
#: Of these rows: steps, and those of them that are not counted. The first makes the state; the order is learnt from two.
STEPS, WARM = 8, 3
WEIGHT_FRAMES, STATE_FRAMES = 6_000_000_000, 3_000_000_000
#: Layers of the two trainings from which `7b_bound` is extrapolated.
FEW, MORE = 4, 12
#: In addition to the state of `7b`: activations, logits and contexts.
ROOM_BYTES = 20_000_000_000


class Frames(enum.Enum):
    """The device memory that the state of an optimizer has."""

    GIVEN = "as the job was told"
    LIKE_WEIGHTS = "as large a share as the weights have"
    LEAST = "what one parameter needs, and the weights have the rest of such a share of both"
    CHANGING = "more and less, while it trains"
    WHAT_IS_LEFT = "what a budget leaves; the weights too"


@dataclass(frozen=True)
class Row:
    """A process, and what it is compared with."""

    name: str
    #: What it does, with this row, the options, torch and its data.
    run: Callable[..., None]
    #: The row that its losses must equal, bit for bit.
    reference: str = "resident"
    shape: str = "2b"
    #: The share of the weights that there are frames for; 0 where they are not paged.
    weights: float = 0.0
    #: When a paged optimizer steps; empty where its state is not paged.
    step: str = ""
    frames: Frames = Frames.GIVEN
    #: Is what forward saves in host memory, by Sublet?
    is_saved: bool = False
    #: Is the tenant paused in some of its steps?
    is_paused: bool = False
    #: Does it show what others do?
    is_of_others: bool = False
    needs: tuple[str, ...] = ()
    #: The row whose steps its own are compared with, if that is not the reference.
    compared: str = ""

    @property
    def is_paged(self) -> bool:
        """Is it under Sublet?"""
        return bool(self.weights or self.step or self.is_saved)


def loop(
    torch: Any,
    data: list[Any],
    steps: int,
    warm: int,
    step: Callable[[int, Any], tuple[Any, Any]],
    *,
    is_paged: bool = False,
    series: str = "step_s",
    behind: Callable[[], None] | None = None,
    says: bool = True,
) -> tuple[list[float], list[float]]:
    """Makes these steps and says what each of them took but the first ones, then losses and memory; losses and times.

    `step(number, batch)` returns the loss, and nothing or what is to be done behind it; such a step does not count. `behind` is
    called behind each. Of a paged process it is said too what was moved.
    """
    peak_bytes, losses, times = 0, [], []
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    for number in range(steps):
        before = moved() if is_paged else {}
        began = time.perf_counter()
        loss, after = step(number, data[number % len(data)])
        torch.cuda.synchronize()
        took = time.perf_counter() - began
        if after is not None:
            after()
        elif number >= warm:
            times.append(took)
            runner.sample(series, took)
            for name, value in (moved() if before else {}).items():
                runner.sample(f"{name}_a_step", value - before[name])
        losses.append(float(loss))
        if behind is not None:
            behind()
        free, total = torch.cuda.mem_get_info()
        peak_bytes = max(peak_bytes, total - free)
    if says:
        runner.fact("losses", losses)
    runner.fact("torch_peak_bytes", torch.cuda.max_memory_allocated())
    runner.fact("device_bytes", peak_bytes)
    return losses, times


def report() -> None:
    """Says what was moved."""
    import sublet

    runner.fact("report", sublet.report())


def make(torch: Any, name: str, layers: int | None = None, device: str = "cuda") -> Any:
    """A model of a shape, with random weights that are the same in each process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = SHAPES[name]
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=layers or shape.layers,
        intermediate_size=shape.inner,
        vocab_size=VOCABULARY,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        max_position_embeddings=TOKENS,
        attn_implementation="sdpa",
        tie_word_embeddings=False,
        use_cache=False,
    )
    torch.manual_seed(1)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if shape.is_bf16 else torch.float32)
    began = time.perf_counter()
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    runner.fact("making_s", time.perf_counter() - began)
    return model


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ---------------------------------------------------------------- what 7b is compared with


def bound(_row: Row, args: Any, torch: Any, data: list[Any]) -> None:
    """The row `7b_bound`."""
    runner.fact("link", link(torch))
    with torch.device("meta"):
        parameters = count(make(torch, "7b", args.layers, "meta"))
    total = torch.cuda.get_device_properties(0).total_memory
    layers = args.layers or SHAPES["7b"].layers
    runner.fact("parameters", parameters)
    if 16 * parameters + ROOM_BYTES < total:
        times = resident(args, torch, data, layers)
    else:
        few, more = (resident(args, torch, data, number) for number in (FEW, MORE))
        runner.fact("layers", [FEW, MORE])
        times = [two + (two - one) / (MORE - FEW) * (layers - MORE) for one, two in zip(few, more)]
    for took in times:
        runner.sample("step_s", took)


def step_of(torch: Any, model: Any, optimizer: Any) -> Callable[[int, Any], tuple[Any, Any]]:
    """An ordinary step."""

    def step(_number: int, batch: Any) -> tuple[Any, Any]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), None

    return step


def resident(args: Any, torch: Any, data: list[Any], layers: int) -> list[float]:
    """Seconds of each counted step of a training with so many layers, all on the GPU."""
    model = make(torch, "7b", layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    is_whole = layers == SHAPES["7b"].layers
    how = {"series": f"layers{layers}_step_s", "says": is_whole}
    _, times = loop(torch, data, min(args.steps, STEPS), WARM, step_of(torch, model, optimizer), **how)
    del model, optimizer
    torch.cuda.empty_cache()
    return times


def link(torch: Any) -> dict[str, float]:
    """What copy engines carry both ways simultaneously, in GB/s: the median of some rounds of 2 GiB in 64 MiB."""
    there = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    here = [torch.zeros(GIB, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    pairs = [(there[0], here[0]), (here[1], there[1])]
    streams = [torch.cuda.Stream() for _ in pairs]
    rates: list[list[float]] = [[], []]
    for _ in range(5):
        events = []
        for stream, (target, source) in zip(streams, pairs):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                start.record()
                for _ in range(2):
                    for low in range(0, GIB, 64 * MIB):
                        target[low : low + 64 * MIB].copy_(source[low : low + 64 * MIB], non_blocking=True)
                end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        for each, (start, end) in zip(rates, events):
            each.append(2 * GIB / start.elapsed_time(end) / 1e6)
    return {name: statistics.median(each) for name, each in zip(("in_gb_s", "out_gb_s"), rates)}


# ---------------------------------------------------------------- 7b


def moved() -> dict[str, int]:
    """What the pagers of this process have copied and waited for so far."""
    import sublet

    names = ("in_bytes", "out_bytes", "waited_us", "hits", "misses")
    return {name: sum(each.get(name, 0) for each in sublet.report()) for name in names}


def train_paged(_row: Row, args: Any, torch: Any, data: list[Any]) -> None:
    """The row `7b`."""
    import sublet

    model = make(torch, "7b", args.layers)
    parameters = count(model)
    runner.fact("parameters", parameters)
    runner.fact("state_bytes", 16 * parameters)
    runner.fact("frames_bytes", [WEIGHT_FRAMES, STATE_FRAMES])
    began = time.perf_counter()
    model = sublet.paged(model, frames=WEIGHT_FRAMES)
    torch.cuda.empty_cache()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    optimizer = sublet.paged(optimizer, frames=STATE_FRAMES, step="backward")
    runner.fact("paging_s", time.perf_counter() - began)
    losses, _ = loop(torch, data, min(args.steps, STEPS), WARM, step_of(torch, model, optimizer), is_paged=True)
    runner.row("all losses are numbers", all(abs(loss) < 100 for loss in losses))
    report()


def compare(result: Result) -> None:
    """Adds to the baseline what `7b` took over its bound, and its traffic over the link's."""
    samples, facts = result.data["samples"], result.data["facts"]
    needed = ("7b_step_s", "7b_bound_step_s", "7b_in_bytes_a_step", "7b_out_bytes_a_step")
    if not all(samples.get(name) for name in needed) or "link" not in facts.get("7b_bound", {}):
        return
    found = against_bound(samples["7b_step_s"], samples["7b_bound_step_s"], facts["7b"]["parameters"], facts["7b_bound"]["link"])
    for way in ("in", "out"):
        each = statistics.median(samples[f"7b_{way}_bytes_a_step"])
        found[f"{way}_bytes"] = each
        found[f"{way}_gb_s"] = each / found["step_s"] / 1e9
        found[f"{way}_over_link"] = found[f"{way}_gb_s"] / facts["7b_bound"]["link"][f"{way}_gb_s"]
        found[f"{way}_over_least"] = each / found[f"least_{way}_bytes"]
    result.data["baseline"]["7b"] = found
    result.note("7b: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if "losses" in facts["7b_bound"]:
        result.check("7b: losses, bit for bit", facts["7b"]["losses"] == facts["7b_bound"]["losses"])


def against_bound(steps: list[float], computes: list[float], parameters: int, rates: dict[str, float]) -> dict[str, float]:
    """A step's time, its bound and what the bound is made of. Sizes are of fp32."""
    weights, moments = 4 * parameters - WEIGHT_FRAMES, 8 * parameters - STATE_FRAMES
    least_in, least_out = 2 * max(weights, 0) + max(moments, 0), max(weights, 0) + max(moments, 0)
    compute_s = statistics.median(computes)
    link_s = max(least_in / rates["in_gb_s"], least_out / rates["out_gb_s"]) / 1e9
    step_s = statistics.median(steps)
    return {
        "step_s": step_s,
        "compute_s": compute_s,
        "link_s": link_s,
        "over_bound": step_s / max(compute_s, link_s),
        "least_in_bytes": least_in,
        "least_out_bytes": least_out,
    }
