"""What does the first replay of a CUDA graph cost after a resume, compared with a normal one and with capturing it again?

A decoder (attention over a cache, two dense layers, `--layers` times) has a graph for each batch size from 1 to
`--graphs`, as inference engines do, all in one shared pool. In one process: every graph replayed `ROUNDS` times, then
`--cycles` pauses of the idle process by the command, each followed by the first replay of every graph and a normal one;
then as many pauses while it replays, at instants of `--seed`; then every graph captured again. Every replay's outputs are
the same words as those of the first, or the job fails. The same without Sublet and without pauses is the baseline.

Bound: a replay of 4 layers is some 50 kernels, 0.15 ms; a first one touches pages that the device's caches do not know,
and the driver's work for executable graphs is not redone, since addresses stay. A capture takes a few ms.
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import JobError, Result
from suite import main, options, role_of

ROUNDS = 3
CONTEXT, HEADS, WORDS = 256, 16, 8192
#: Where in the cache a step writes.
PLACE = CONTEXT // 2
#: Seconds of the replays that a pause comes into.
BUSY_S = 0.5

parse = options(
    __doc__, 200, graphs=(100, "graphs, one for each batch size"), cycles=(10, "pauses of the idle process, and as many while it replays"),
    layers=4, width=1024, seed=(1, "of the instants of pauses while it replays"), role=role_of("graphs"),
)


# ---------------------------------------------------------------- in the process


class Decoder:
    """Weights, a cache, and what a step of `batch` sequences does."""

    def __init__(self, torch: Any, device: Any, layers: int, width: int, batch_max: int) -> None:
        self.torch, self.width = torch, width
        torch.manual_seed(0)

        def numbers(*shape: int) -> Any:
            return torch.randn(*shape, device=device) / width**0.5

        self.embedding = numbers(WORDS, width)
        self.layers = [
            {"mixed": numbers(width, 3 * width), "joined": numbers(width, width), "wide": numbers(width, 4 * width),
             "narrow": numbers(4 * width, width)}
            for _ in range(layers)
        ]  # fmt: skip
        shape = (batch_max, HEADS, CONTEXT, width // HEADS)
        self.caches = [(numbers(*shape), numbers(*shape)) for _ in range(layers)]
        self.tokens = torch.arange(batch_max, device=device) % WORDS

    def step(self, batch: int) -> Any:
        """Each sequence's next words, as numbers for all words."""
        torch = self.torch
        x = self.embedding[self.tokens[:batch]]
        for layer, (keys, values) in zip(self.layers, self.caches, strict=True):
            query, key, value = (torch.nn.functional.layer_norm(x, (self.width,)) @ layer["mixed"]).view(
                batch, 3, HEADS, 1, -1
            ).unbind(1)
            keys[:batch, :, PLACE : PLACE + 1].copy_(key)
            values[:batch, :, PLACE : PLACE + 1].copy_(value)
            weights = torch.softmax(query @ keys[:batch].transpose(2, 3) / (self.width // HEADS) ** 0.5, dim=-1)
            x = x + (weights @ values[:batch]).reshape(batch, self.width) @ layer["joined"]
            hidden = torch.nn.functional.layer_norm(x, (self.width,)) @ layer["wide"]
            x = x + torch.nn.functional.gelu(hidden) @ layer["narrow"]
        return x @ self.embedding.t()


class Graphs:
    """The graphs of all batch sizes, and their outputs. Without a GPU the steps run as they are."""

    def __init__(self, args: Any) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import checksum
        import torch

        self.torch, self.cuda = torch, torch.cuda.is_available()
        device = torch.device("cuda", 0) if self.cuda else torch.device("cpu")
        self.sizes = range(args.graphs, 0, -1)
        self.decoder = Decoder(torch, device, args.layers, args.width, args.graphs)
        self.checksum = checksum.Checksum(torch, device)
        self.graphs: dict[int, Any] = {}
        self.outputs: dict[int, Any] = {}
        self.expected: dict[int, int] = {}
        if self.cuda:
            self.pool, self.side = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def wait(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()

    def versions(self) -> dict[str, Any]:
        return runner.versions()

    def capture(self) -> list[float]:
        """Captures every graph, the largest first, in the one pool; the milliseconds of each."""
        with self.torch.no_grad():
            for batch in [] if self.graphs else self.sizes:
                self.decoder.step(batch)  # what is made on first use
            self.wait()
            return [self.capture_one(batch) for batch in self.sizes]

    def capture_one(self, batch: int) -> float:
        """Captures the graph of a batch size instead of the one there was, and makes it executable; the milliseconds.

        By torch's own calls: its context manager also collects garbage, which is not what is asked here.
        """
        self.graphs.pop(batch, None)
        began = time.perf_counter()
        if self.cuda:
            graph = self.torch.cuda.CUDAGraph()
            with self.torch.cuda.stream(self.side):
                graph.capture_begin(pool=self.pool)
                self.outputs[batch] = self.decoder.step(batch)
                graph.capture_end()
            self.graphs[batch] = graph
            self.wait()
        return round((time.perf_counter() - began) * 1e3, 3)

    def replay(self, batch: int) -> float:
        self.wait()
        began = time.perf_counter()
        if self.cuda:
            self.graphs[batch].replay()
        else:
            with self.torch.no_grad():
                self.outputs[batch] = self.decoder.step(batch)
        self.wait()
        return round((time.perf_counter() - began) * 1e6, 1)

    def is_right(self, batch: int) -> bool:
        """Are the outputs those of the first replay?"""
        words = self.checksum.of(self.outputs[batch])
        return self.expected.setdefault(batch, words) == words

    def all(self, rounds: int) -> dict[str, Any]:
        """Every graph replayed, `rounds` times one after the other: microseconds by round, and what came out wrong."""
        times: list[list[float]] = [[] for _ in range(rounds)]
        wrong = []
        for number in range(rounds):
            for batch in self.sizes:
                times[number].append(self.replay(batch))
                if not self.is_right(batch):
                    wrong.append(batch)
        return {"us": times, "wrong": wrong}

    def busy(self, seconds: float) -> dict[str, Any]:
        """Replays one graph after the other for so long, then looks at the last of each."""
        end, count, wrong = time.monotonic() + seconds, 0, []
        while time.monotonic() < end:
            for batch in self.sizes:
                if self.cuda:
                    self.graphs[batch].replay()
                count += 1
                if count % 7 == 0 and self.cuda and not self.is_right(batch):
                    wrong.append(batch)
        self.wait()
        return {"count": count, "wrong": wrong}

    def exit(self) -> None:
        """Ends all graphs."""
        self.graphs.clear()

    def memory(self) -> int:
        """Bytes that torch has from the driver."""
        return self.torch.cuda.memory_reserved() if self.cuda else 0


# ---------------------------------------------------------------- the job


class Job:
    """The run without Sublet, then that with pauses."""

    def __init__(self, args: Any, result: Result, work: Path) -> None:
        self.args, self.result, self.work = args, result, work
        self.random = random.Random(args.seed)
        self.tenant = f"graphs-{os.getpid()}"

    def start(self, label: str, tenant: str | None) -> runner.Ranks:
        """The process, with its graphs captured and their outputs known."""
        args = self.args
        script = [__file__, "--role", "graphs", "--graphs", str(args.graphs), "--layers", str(args.layers), "--width", str(args.width)]
        env = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}
        process = runner.Ranks(
            self.work, label, 1, script, launcher="alone", life_s=args.deadline, tenant=tenant, env=env
        )
        self.add(f"{label}_capture_ms", process.call("capture", 90)[0])
        return process

    def add(self, series: str, values: list[float]) -> None:
        for value in values:
            self.result.sample(series, value)

    def replays(self, process: runner.Ranks, what: str, rounds: int) -> list[list[float]]:
        """Every graph replayed and checked."""
        told = process.call("all", 60, rounds=rounds)[0]
        self.result.check(f"{what}: all outputs are those of the first replays", not told["wrong"], f"{told['wrong'][:20]}")
        return told["us"]

    def change(self, action: str, what: str) -> None:
        """Pauses or resumes by the command, which must succeed."""
        told = cli.sublet(action, self.tenant, "--timeout", "10s", "--json", timeout_s=40)
        self.result.sample(f"{action}_ms", round(told["wall_s"] * 1e3, 2))
        if not self.result.check(f"{what}: {action}", told["exit"] == 0, cli.say(told) if told["exit"] else ""):
            raise JobError(f"{what}: {cli.say(told)}")

    def plain(self) -> None:
        process = self.start("plain", None)
        for times in self.replays(process, "without Sublet", ROUNDS)[1:]:
            self.add("plain_normal_us", times)
        self.add("plain_recapture_ms", process.call("capture", 90)[0])
        self.replays(process, "without Sublet, captured again", 1)
        process.close()

    def paused(self) -> None:
        """The run with pauses."""
        process = self.start("hooked", self.tenant)
        self.result.data["versions"].update(process.call("versions")[0])
        self.result.data["parameters"]["reserved_bytes"] = process.call("memory")[0]
        for times in self.replays(process, "before", ROUNDS)[1:]:
            self.add("normal_us", times)
        for cycle in range(self.args.cycles):
            what = f"pause {cycle}, idle"
            self.change("pause", what)
            self.change("resume", what)
            first, second = self.replays(process, what, 2)
            self.add("first_us", first)
            self.add("normal_us", second)
        for cycle in range(self.args.cycles):
            what = f"pause {cycle}, replaying"
            chosen = process.send("busy", seconds=BUSY_S)
            time.sleep(self.random.uniform(0.0, BUSY_S * 0.8))
            self.change("pause", what)
            self.change("resume", what)
            told = process.collect("busy", chosen, 60)[0]
            self.result.check(f"{what}: outputs are right", not told["wrong"], f"{told['wrong'][:20]}")
            self.replays(process, f"{what}, afterwards", 1)
        self.add("recapture_ms", process.call("capture", 90)[0])
        self.replays(process, "captured again", 1)
        process.close()

    def run(self) -> None:
        """Both, then the table."""
        try:
            self.plain()
            self.paused()
        finally:
            self.report()

    def report(self) -> None:
        """Prints what each kind of replay took, and puts the baseline into the record."""
        samples = self.result.data["samples"]
        baseline = {name: samples.get(name, []) for name in ("plain_normal_us", "plain_recapture_ms")}
        self.result.data["baseline"] = {name: common.summarise(values) for name, values in baseline.items() if values}
        rows: list[tuple[str, ...]] = [("per graph", "median", "p99", "max", "count")]
        for name, series, scale in (
            ("without Sublet: replay, us", "plain_normal_us", 1.0),
            ("replay, us", "normal_us", 1.0),
            ("first replay after a resume, us", "first_us", 1.0),
            ("captured again, us", "recapture_ms", 1e3),
            ("without Sublet: captured again, us", "plain_recapture_ms", 1e3),
            ("pause, ms", "pause_ms", 1.0),
            ("resume, ms", "resume_ms", 1.0),
        ):
            values = [value * scale for value in samples.get(series, [])]
            if values:
                figures = common.summarise(values)
                shown = [f"{figures[key]:.1f}" for key in ("median", "p99", "max")]
                rows.append((name, *shown, str(figures["count"])))
        print()
        runner.table(rows)


if __name__ == "__main__":
    main(parse, "graphs", lambda *given: Job(*given).run(), {"graphs": Graphs})
