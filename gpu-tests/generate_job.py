"""Does a language model generate the same tokens before, between and after pauses?

A transformers model of Llama's architecture with the shapes of 7B and random weights in bf16 generates greedily with a
static KV cache. First a run that nothing pauses, whose tokens are the reference; then, with torch's ordinary and with
expandable segments:

- outside: no word of Sublet in the script. The tenant is paused and resumed by the command, `--cycles` times at
  whatever instant it comes, while the script generates again and again;
- regions: weights and KV cache are made in regions. In the middle of one generation, `--cycles` times, both tags are
  paused and resumed from inside, then everything; so is memory in which half of the KV cache is written.
- graph: a step captured as a CUDA graph is replayed to the same tokens after pauses of everything.

Bound: 13.5 GB at 55 GB/s is 0.25 s each way, so 10 cycles take 5 s; a model is made in some 2 s, tokens come at 30 a
second and more. The run is three starts of torch and transformers, some 100 s.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import JobError, Result
from suite import main, options, role_of

ALLOCATORS = ("native", "expandable")
PROMPT = 48

parse = options(
    __doc__, 220, cycles=10, tokens=64, layers=(32, "layers of the model; 32 make 7B"), role=role_of("plain", "outside", "regions"),
    stop=(Path, "used by the job itself: a file that ends the generating"),
)


# ---------------------------------------------------------------- the script that generates


class Model:
    """The model, its prompt, and the tokens that follow."""

    def __init__(self, args: Any, weights_in: contextlib.AbstractContextManager[Any]) -> None:
        import torch
        import transformers

        self.torch, self.transformers, self.tokens = torch, transformers, args.tokens
        torch.manual_seed(20)
        config = transformers.LlamaConfig(
            hidden_size=4096,
            intermediate_size=11008,
            num_hidden_layers=args.layers,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=32000,
            max_position_embeddings=2048,
        )
        torch.set_default_dtype(torch.bfloat16)
        with weights_in, torch.device("cuda:0"):
            self.model = transformers.LlamaForCausalLM(config).eval()
            # Larger than usual, so that attention and tokens depend on all of it.
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    torch.nn.init.normal_(parameter, std=0.04)
        self.prompt = torch.randint(0, 32000, (2, PROMPT), device="cuda:0")
        torch.cuda.synchronize()
        self.weights_bytes = sum(each.numel() * each.element_size() for each in self.model.parameters())

    def generate(self, each_token: Any = None) -> list[list[int]]:
        """New tokens of each sequence; `each_token(number)` is called after every one."""
        criteria = [Every(self.torch, each_token)] if each_token is not None else []
        with self.torch.no_grad():
            found = self.model.generate(
                self.prompt,
                attention_mask=self.torch.ones_like(self.prompt),
                max_new_tokens=self.tokens,
                min_new_tokens=self.tokens,
                do_sample=False,
                cache_implementation="static",
                disable_compile=True,
                pad_token_id=0,
                stopping_criteria=self.transformers.StoppingCriteriaList(criteria),
            )
        return found[:, PROMPT:].tolist()

    def captured(self) -> Any:
        """A function that makes tokens by replaying a graph of one step, which has no cache."""
        torch = self.torch
        length = PROMPT + 16
        ids = torch.zeros(1, length, dtype=torch.long, device="cuda:0")
        place = torch.zeros(1, dtype=torch.long, device="cuda:0")

        def step() -> None:
            logits = self.model(input_ids=ids, use_cache=False).logits
            following = logits.index_select(1, place).argmax(-1)
            place.add_(1)
            ids.index_copy_(1, place, following)

        def start() -> None:
            ids.zero_()
            ids[:, :PROMPT].copy_(self.prompt[:1])
            place.fill_(PROMPT - 1)

        with torch.no_grad():
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                start()
                step()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()

        def run() -> list[int]:
            start()
            for _ in range(15):
                graph.replay()
            return ids[0, PROMPT:].tolist()

        return run


class Every:
    """A stopping criterion that stops nothing and calls something after each token."""

    def __init__(self, torch: Any, action: Any) -> None:
        self.torch, self.action, self.number = torch, action, 0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.action(self.number)
        self.number += 1
        return self.torch.zeros(input_ids.shape[0], dtype=self.torch.bool, device=input_ids.device)


def digest(tokens: Any) -> str:
    """Tokens as text that two processes can compare."""
    return ",".join(str(token) for sequence in tokens for token in sequence)


def role_plain(args: Any) -> None:
    """Generates, and once more: the reference, and whether it is the same each time; then until `--stop` is there."""
    model = Model(args, contextlib.nullcontext())
    first = model.generate()
    began = time.perf_counter()
    again = model.generate()
    runner.fact("seconds", time.perf_counter() - began)
    runner.fact("weights_bytes", model.weights_bytes)
    runner.fact("tokens", digest(first))
    runner.row("the same tokens each time", first == again and len(set(first[0])) > 1)
    if args.stop is None:
        return
    replay, expected = None, None
    try:
        replay = model.captured()
        expected = replay()
    except Exception as error:
        runner.fact("not_captured", f"{type(error).__name__}: {error}"[:600])
    runner.fact("ready", True)
    rounds, wrong, wrong_replays = 0, 0, 0
    while not args.stop.exists():
        wrong += model.generate() != first
        wrong_replays += replay is not None and replay() != expected
        rounds += 1
    wrong += model.generate() != first
    runner.row("tokens of every generation", wrong == 0, f"{wrong} of {rounds + 1} others")
    if replay is not None:
        wrong_replays += replay() != expected
        runner.row("tokens of every replay", wrong_replays == 0, f"{wrong_replays} of {rounds + 1} others")


def role_regions(args: Any) -> None:
    """Pauses in the middle of generating, by tag and as a whole."""
    import sublet

    model = Model(args, sublet.region("weights"))

    def generate(each_token: Any = None) -> list[list[int]]:
        # Kept, since it is paused while half of the cache is written.
        with sublet.region("kv", contents="keep"):
            return model.generate(each_token)

    first = generate()
    runner.fact("tokens", digest(first))
    stride = max(1, (args.tokens - 4) // args.cycles)
    for label, tags in (("by tag", ["weights", "kv"]), ("everything", None)):
        done = 0

        def cycle(number: int, tags: Any = tags, label: str = label) -> None:
            nonlocal done
            if number % stride or done == args.cycles:
                return
            done += 1
            for act in (sublet.pause, sublet.resume):
                began = time.perf_counter()
                act(tags=tags, timeout=30)
                runner.sample(f"{act.__name__}_{label.split()[-1]}_s", time.perf_counter() - began)

        tokens = generate(cycle)
        runner.row(
            f"{label}: {args.cycles} cycles within a generation",
            done == args.cycles and tokens == first,
            f"{done} cycles",
        )
    runner.row("tokens after all of them", generate() == first)
    held = [entry for device in sublet.stats()["pool"]["devices"] for entry in device["memory"] if entry["tag"]]
    runner.fact("held", held)


def role(args: Any) -> None:
    """A process of the job."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    role_regions(args) if args.role == "regions" else role_plain(args)


# ---------------------------------------------------------------- the job


def environment(allocator: str) -> dict[str, str]:
    conf = f"expandable_segments:{allocator == 'expandable'}"
    return {"PYTORCH_CUDA_ALLOC_CONF": conf, "PYTORCH_ALLOC_CONF": conf, "TOKENIZERS_PARALLELISM": "false"}


def outside(args: Any, result: Result, work: Path, allocator: str) -> None:
    """Pauses a script that knows of nothing."""
    label, stop, tenant = f"outside_{allocator}", work / f"stop-{allocator}", f"generate-{allocator}-{os.getpid()}"
    command = [__file__, "--role", "outside", "--stop", str(stop), *common_options(args)]
    child = runner.Child(work, label, command, tenant=tenant, env=environment(allocator))
    try:
        child.wait_fact("ready", 80)
    except JobError as error:
        result.check(f"{label}: starts", False, str(error))
        return
    for cycle in range(args.cycles):
        for action in ("pause", "resume"):
            told = cli.sublet(action, tenant, "--json", timeout_s=40)
            result.sample(f"{label}_{action}_s", told["wall_s"])
            if not result.check(
                f"{label}: {action} {cycle}", told["exit"] == 0, cli.say(told) if told["exit"] else ""
            ):
                child.abort()
                return
        time.sleep(0.02 * (cycle + 1))  # another instant of the generation each time
    stop.touch()
    facts = child.finish(result, 60)
    if "not_captured" in facts:
        result.note(f"{label}: no graph was replayed: {facts['not_captured']}")


def common_options(args: Any) -> list[str]:
    """What every child is told."""
    sizes = ["--cycles", str(args.cycles), "--tokens", str(args.tokens), "--layers", str(args.layers)]
    return [*sizes, "--deadline", "120"]


def body(args: Any, result: Result, work: Path) -> None:
    """The reference, and each allocator: a script paused from outside and one that pauses itself, side by side."""
    site = runner.package(work, "sublet")
    # Two models are away simultaneously; a layer has some 202 million weights, what is around them 262 million.
    result.data["host_warmed"] = common.touch_host_memory(2.2 * 2 * (args.layers * 202e6 + 262e6) / common.GIB)
    plain = runner.Child(
        work, "plain", [__file__, "--role", "plain", *common_options(args)], env=environment("native")
    )
    for allocator in ALLOCATORS:
        command = [__file__, "--role", "regions", *common_options(args)]
        tenant, label = f"regions-{allocator}-{os.getpid()}", f"regions_{allocator}"
        regions = runner.Child(work, label, command, tenant=tenant, sites=[site], env=environment(allocator))
        outside(args, result, work, allocator)
        regions.finish(result, 90)
    plain.finish(result, 30)
    facts = result.data["facts"]
    reference = facts["plain"].get("tokens", "")
    result.data["baseline"] = {name: facts["plain"].get(name) for name in ("seconds", "weights_bytes")}
    for label in (f"{kind}_{allocator}" for kind in ("outside", "regions") for allocator in ALLOCATORS):
        same = facts.get(label, {}).get("tokens") == reference != ""
        result.check(f"{label}: tokens as without Sublet", same)
    runner.verdicts(result)
    print()
    rows: list[tuple[str, ...]] = [("median seconds", "pause", "resume")]
    for series in sorted(name[: -len("_pause_s")] for name in result.data["samples"] if name.endswith("_pause_s")):
        rows.append((series, *(middle(result, f"{series}_{action}_s") for action in ("pause", "resume"))))
    for allocator in ALLOCATORS:
        for kind in ("tag", "everything"):
            names = [f"regions_{allocator}_{action}_{kind}_s" for action in ("pause", "resume")]
            rows.append((f"regions_{allocator}, {kind}", *(middle(result, name) for name in names)))
    runner.table(rows)


def middle(result: Result, series: str) -> str:
    """The median of a series, as text."""
    found = common.summarise(result.data["samples"].get(series, []))["median"]
    return "-" if found is None else f"{found:.3f}"


if __name__ == "__main__":
    main(parse, "generate", body, dict.fromkeys(("plain", "outside", "regions"), role))
