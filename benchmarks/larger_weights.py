"""The rows of `larger` whose weights are off the device, by `sublet.paged(model)`.

| row | what runs | frames |
| --- | --- | --- |
| `w_all`, `w_half`, `w_third` | the training of `resident`, its optimizer stock and after backward | all weights, a half, a third |
| `region_third` | the same, with the weights in a region whose home is `paged` | a third |
| `wo_third`, `wo_third_after` | the same, with the optimizer's state paged too, its step in backward or after it | a third, and `--frames` |
| `wo_sixth`, `wo_twelfth` | the same, in backward | of all state as much; in the twelfth 0.8 GB of it are for the optimizer |
| `left` | the same, without figures: frames are what a budget of 22 GiB leaves | |
| `resized` | the same, in backward. Frames change while work is under way: the optimizer's are 12 GiB, then 4, then 12; those of weights 6, 2 and 6 | |
| `infer`, `infer_half`, `infer_third` | forward alone, in bf16 | none is paged, a half, a third |
| `lora`, `lora_half`, `lora_third` | a frozen base in bf16 with small trained matrices | the same |
| `lora14`, `lora14_third` | as `lora`, with a base of 14 billion parameters | the same |
| `graphs` | twelve layers; a CUDA graph of four of them is replayed between passes through all, and the window ends with replays under way | two thirds |
| `look` | no training: which operators' uses of paged weights the launch look sees, and what a launch costs | a third |
"""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import larger_models
import runner
from larger_models import Frames, Row

#: Of `resized`, in GiB: the frames of weights and of the optimizer's state.
WIDE, NARROW = (6, 12), (2, 4)
#: Of `left`: the budget, and what a context takes in addition, at most.
BUDGET_GIB, CONTEXT_GIB = 22, 1
#: Of `wo_twelfth`, in bytes: what the moments of the largest parameter need, and a chunk more.
LEAST_STATE_FRAMES = 12 << 26
#: Of an eager operator: those that launch nothing, though they take a weight.
WITHOUT_LAUNCH = ("detach", "t.default", "view", "transpose", "expand", "alias", "_unsafe_view", "permute", "slice", "select", "unsqueeze", "split", "as_strided")
LAUNCHES, ROUNDS, SETTLE_S = 1_000, 20, 1.0
#: Of the row `graphs`: width of a layer, replays that are compared, and those that are under way when the window ends.
GRAPHED_WIDTH, REPLAYS, QUEUED = 8192, 20, 50


def page(row: Row, model: Any) -> Any:
    """The model of this row, with its weights where the row has them."""
    import sublet
    import torch

    total = bytes_of(model)
    frames = int(total * row.weights) + (64 << 20 if row.weights == 1.0 else 0)
    if row.frames is Frames.CHANGING:
        frames = WIDE[0] << 30
    elif row.frames is Frames.LEAST:
        frames = int(3 * total * row.weights) - LEAST_STATE_FRAMES
    runner.fact("weights_bytes", total)
    runner.fact("frames_bytes", frames)
    began = time.perf_counter()
    if row.name == "region_third":
        with sublet.region("base", home="paged", frames=frames):
            for parameter in model.parameters():
                parameter.data = parameter.detach().clone()
    else:
        model = sublet.paged(model) if row.frames is Frames.WHAT_IS_LEFT else sublet.paged(model, frames=frames)
    runner.fact("paging_s", time.perf_counter() - began)
    torch.cuda.empty_cache()
    return model


def bytes_of(model: Any) -> int:
    """What its weights take."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def state_frames(row: Row, model: Any, given: str) -> int | str | None:
    """Frames for the optimizer's state of a row: in most as many as were given."""
    frames: dict[Frames, Any] = {Frames.WHAT_IS_LEFT: None, Frames.CHANGING: WIDE[1] << 30, Frames.LEAST: LEAST_STATE_FRAMES}
    # Two moments, each as large as the weights.
    frames[Frames.LIKE_WEIGHTS] = int(2 * row.weights * bytes_of(model))
    return frames.get(row.frames, given)


def resize(step: int, steps: int, model: Any, optimizer: Any) -> None:
    """In the row `resized`: fewer frames after a third of the steps, and more after two."""
    import sublet

    changes = {steps // 3: NARROW, 2 * steps // 3: WIDE}
    if step in changes:
        for target, frames in zip((model, optimizer), changes[step]):
            began = time.perf_counter()
            sublet.set_frames(target, f"{frames}GiB")
            runner.sample("resizing_s", time.perf_counter() - began)
        runner.fact(f"resident_bytes_{step}", [each["resident_bytes"] for each in sublet.report()])
        least = sorted(each["frames_bytes"] for each in sublet.report())
        runner.row(f"step {step}: frames are {changes[step]} GiB", least == [frames << 30 for frames in changes[step]], str(least))


def plan(targets: dict[str, Any]) -> None:
    """What would be moved a step with other frames, as `sublet.plan` says it."""
    import sublet

    plans = {name: sublet.plan(target) for name, target in targets.items()}
    runner.fact("plan", {name: list(plan.rows) for name, plan in plans.items()})
    for name, found in plans.items():
        print(f"{name}\n{found}")


def add_small_matrices(torch: Any, model: Any) -> list[Any]:
    """Freezes the model and gives each projection two small trained matrices, as LoRA does. Those."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = []
    generator = torch.Generator("cuda").manual_seed(3)
    for name, part in model.named_modules():
        if not isinstance(part, torch.nn.Linear) or "lm_head" in name:
            continue
        down = torch.randn(16, part.in_features, device="cuda", generator=generator) / 64
        up = torch.zeros(part.out_features, 16, device="cuda")
        pair = [torch.nn.Parameter(each.bfloat16()) for each in (down, up)]

        def add(_: Any, given: Any, made: Any, pair: Any = pair) -> Any:
            return made + (given[0] @ pair[0].t()) @ pair[1].t()

        part.register_forward_hook(add)
        trained += pair
    return trained


def steps(row: Row, args: Any, torch: Any, data: list[Any]) -> None:
    """The rows without an optimizer's own paging: forward alone, or with small trained matrices."""
    model = larger_models.make(torch, row.shape, args.layers)
    runner.fact("parameters", larger_models.count(model))
    trains = row.name.startswith("lora")
    trained = add_small_matrices(torch, model) if trains else []
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True) if trains else None
    if row.weights:
        model = page(row, model)
    if not trains:
        model.eval()

    def step(_number: int, batch: Any) -> tuple[Any, Any]:
        with torch.set_grad_enabled(trains):
            # A frozen base takes gradients through its inputs alone.
            inputs = model.get_input_embeddings()(batch)
            if trains:
                inputs.requires_grad_()
            loss = model(inputs_embeds=inputs, labels=batch).loss
        if optimizer is not None:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss, None

    # The order is learnt by the first.
    larger_models.loop(torch, data, min(args.steps, larger_models.STEPS) if row.shape == "14b" else args.steps, larger_models.WARM, step)
    if row.weights:
        larger_models.report()


# ---------------------------------------------------------------- graphs


def graphs(_row: Row, _args: Any, torch: Any, _data: list[Any]) -> None:
    """A graph over paged weights, and what a small graph's replay takes with and without a window."""
    import sublet

    def build() -> Any:
        torch.manual_seed(7)
        layers = [torch.nn.Linear(GRAPHED_WIDTH, GRAPHED_WIDTH, bias=False) for _ in range(12)]
        return torch.nn.Sequential(*layers).cuda().half().requires_grad_(False)

    inputs = torch.randn(4096, GRAPHED_WIDTH, device="cuda", dtype=torch.half) / 90
    layer_bytes = 2 * GRAPHED_WIDTH**2
    side = torch.cuda.Stream()
    with torch.no_grad():
        plain = build()
        whole, front = plain(inputs), plain[:4](inputs)
        torch.cuda.synchronize()
        costs = {"plain": replay_us(torch, side)}
        del plain
        model = sublet.paged(build(), frames=8 * layer_bytes)
        right = [torch.equal(model(inputs), whole)]
        graph, made = captured(torch, side, lambda: model[:4](inputs))
        for _ in range(REPLAYS):
            made.zero_()
            graph.replay()
            right += [torch.equal(made, front), torch.equal(model(inputs), whole)]
        runner.row(f"{sum(right)} of {len(right)} results of replays and of passes between them are the same bits", all(right))
        costs["paged"] = replay_us(torch, side)
        runner.fact("replay_us", costs)
        larger_models.report()
        for _ in range(QUEUED):
            graph.replay()
        del model
        gc.collect()
        other = sublet.paged(build(), frames=4 * layer_bytes)
        same = torch.equal(other(inputs), whole) and torch.equal(made, front)
        runner.row(f"the window ended with {QUEUED} replays under way; they and a new window's pass are the same bits", same)


def captured(torch: Any, side: Any, work: Any) -> tuple[Any, Any]:
    """A graph of `work`, warmed up as PyTorch wants it, and what it makes."""
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        made = work()
    return graph, made


def replay_us(torch: Any, side: Any) -> float:
    """What the replay of a graph of one small kernel takes of the thread that asks for it, in microseconds: the least of some rounds."""
    small = torch.zeros(8, device="cuda")
    graph, _ = captured(torch, side, lambda: small.add_(1))
    return least_us(torch, graph.replay)[0]


# ---------------------------------------------------------------- what the look sees, and what it costs


def look(row: Row, args: Any, torch: Any, data: list[Any]) -> None:
    """Every operator's tensors against what the look has counted, and the time of a launch."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    import sublet
    from sublet._library import own_library
    from sublet._paging_weights import owners

    model = larger_models.make(torch, row.shape, args.layers)
    runner.fact("parameters", larger_models.count(model))
    # A part of a parameter, as that of the model is.
    small = torch.nn.Parameter(torch.zeros(1024, device="cuda")).view(-1)[:256].detach()
    costs = {"plain": least_us(torch, lambda: small.add_(1))[0]}
    model = page(row, model)
    first = next(model.parameters())
    with torch.no_grad():
        ours = first.view(-1)[:256].detach()
        both = least_us(torch, lambda: small.add_(1), lambda: ours.add_(1))
    costs["paged, another's memory"], costs["paged, its memory"] = both
    runner.fact("launch_us", costs)
    library, pager = own_library(), owners[model].pager
    low = min(parameter.data_ptr() for parameter in model.parameters())
    high = max(parameter.data_ptr() for parameter in model.parameters())
    seen: dict[str, list[int]] = {}

    class Watch(TorchDispatchMode):
        """Counts operators that are given a weight, and those of them that the look has seen."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
            uses = any(leaf.is_cuda and low <= leaf.data_ptr() <= high for leaf in given)
            name = str(func)
            if not uses or any(word in name for word in WITHOUT_LAUNCH):
                return func(*args, **(kwargs or {}))
            before = json.loads(library.page_report(pager))["calls"]
            made = func(*args, **(kwargs or {}))
            counts = seen.setdefault(name, [0, 0])
            counts[0] += 1
            counts[1] += json.loads(library.page_report(pager))["calls"] > before
            return made

    def train(optimizer: Any) -> None:
        batch = data[0][:1]
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for name, how in (("fused", {"fused": True}), ("foreach", {"foreach": True}), ("single", {"foreach": False})):
        began = time.perf_counter()
        with Watch():
            train(torch.optim.SGD(model.parameters(), lr=1e-5, **how))
            torch.cuda.synchronize()
        runner.fact(f"watched_{name}_s", time.perf_counter() - began)
        runner.row(f"a step with {name} ran", True)
        runner.fact("operators", {name: counts for name, counts in sorted(seen.items())})
    uses, found = (sum(counts[index] for counts in seen.values()) for index in (0, 1))
    runner.fact("uses", uses)
    runner.fact("uses_seen", found)
    runner.row(f"{found} of {uses} uses of weights seen", found == uses)
    larger_models.report()
    print(sublet.report())


def least_us(torch: Any, *calls: Any) -> list[float]:
    """What each call takes, in microseconds: the least of some rounds, each behind an idle GPU. They take turns, since the same thread
    goes at two thirds of its speed for a while."""
    # What has just been paged leaves the device meanwhile.
    time.sleep(SETTLE_S)
    best = [float("inf")] * len(calls)
    for _ in range(ROUNDS):
        for place, call in enumerate(calls):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(LAUNCHES):
                call()
            best[place] = min(best[place], (time.perf_counter() - began) / LAUNCHES * 1e6)
    torch.cuda.synchronize()
    return best
