"""What the rows of the engines share: one row's clock and record, pauses at random instants, streams, comparisons."""

from __future__ import annotations

import http.client
import importlib.metadata
import importlib.util
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cli
import common
import runner
from common import JobError, Result
from suite import is_there

PROGRAMS = Path(__file__).resolve().parent / "programs"
#: Packages whose versions a record names.
PACKAGES = ("vllm", "sglang", "sglang-kernel", "trl", "verl", "ray", "transformers", "deepspeed", "megatron-core", "torch", "nvidia-nccl-cu13")
#: Nothing is fetched, and nobody is told.
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def setting(name: str, usual: float) -> float:
    """A number from the environment, or the usual one."""
    return float(os.environ.get(f"ENGINES_{name}", usual))


def number_of(gpu: int) -> int:
    """The machine's number of a GPU, by its number among those that this run may see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return int(visible.split(",")[gpu]) if visible else gpu


def versions() -> dict[str, str]:
    """The installed versions of the engines and of what they stand on."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---------------------------------------------------------------- pure parts


@dataclass
class Stream:
    """What a client saw of one stream: when each chunk came, and its text."""

    times: list[float] = field(default_factory=list)
    text: str = ""
    error: str = ""


def longest_gap(times: Sequence[float]) -> tuple[float, float, float]:
    """The longest time between two chunks, and its ends; zeros where there are less than two."""
    pairs = list(zip(times, times[1:]))
    if not pairs:
        return 0.0, 0.0, 0.0
    begin, end = max(pairs, key=lambda pair: pair[1] - pair[0])
    return end - begin, begin, end


def added_delay(times: Sequence[float], paused: float, resumed: float) -> float | None:
    """How much longer than the pause a stream stood still.

    `paused` is when the pause had been done, `resumed` when the resume began. Nothing where the stream had ended before
    or began after: no two chunks lie around the pause.
    """
    around = [end - begin for begin, end in zip(times, times[1:]) if begin < resumed and end > paused]
    return max(around) - (resumed - paused) if around else None


def answers_differ(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """Where two answers first differ, in words; empty where all tokens and log-probabilities are the same bits."""
    for name in ("tokens", "logprobs"):
        before, after = expected[name], got[name]
        if len(before) != len(after):
            return f"{len(after)} {name} for {len(before)}"
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                return f"{name} {index}: {other} for {one}"
    return ""


def texts_differ(expected: Sequence[str], got: Sequence[str]) -> list[int]:
    """The numbers of the texts that are not the same."""
    if len(expected) != len(got):
        return list(range(max(len(expected), len(got))))
    return [index for index, pair in enumerate(zip(expected, got, strict=True)) if pair[0] != pair[1]]


def metric(page: str, name: str) -> float | None:
    """The first value of a metric in the text form of Prometheus."""
    found = re.search(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", page, re.MULTILINE)
    return float(found.group(1)) if found else None


def cache_tokens(page: str) -> int | None:
    """How many tokens the KV cache of a vLLM server holds, from its metrics."""
    found = re.search(r"^vllm:cache_config_info\{([^}]*)\}", page, re.MULTILINE)
    labels = dict(re.findall(r'(\w+)="([^"]*)"', found.group(1))) if found else {}
    try:
        return int(labels["num_gpu_blocks"]) * int(labels["block_size"])
    except (KeyError, ValueError):
        return None


def short(samples: Sequence[float], unit: str = "s") -> str:
    """Median and p99 as text."""
    told = common.summarise(samples)
    return f"{told['median']:.3g} / {told['p99']:.3g} {unit}, n {told['count']}" if samples else "-"


# ---------------------------------------------------------------- a row at work


class Context:
    """A row at work: its deadline, its record and what it started."""

    def __init__(self, job: Any, name: str, limit_s: float, record: Result, work: Path) -> None:
        self.job, self.name, self.record, self.work = job, name, record, work
        self.args = job.args
        self.end = time.monotonic() + limit_s
        self.random = random.Random(f"{job.args.seed} {name}")
        self.started: list[runner.Process] = []

    def left_s(self, most: float = 1e9) -> float:
        """Seconds until the row must have ended, but not more than `most`."""
        left = self.end - time.monotonic()
        if left <= 0:
            raise JobError("the row's time is over")
        return min(left, most)

    def tenant(self, what: str = "") -> str:
        """A name for a tenant of this row."""
        return "-".join(filter(None, ("engines", self.name.replace("_", "-"), what, str(os.getpid()))))

    def env(self, gpus: Sequence[int], more: dict[str, str] | None = None) -> dict[str, str]:
        """The environment of an engine on these GPUs. What one run has compiled, the next finds: the same kernels."""
        cache = Path(os.environ.get("ENGINES_CACHE") or self.job.work / "compiled")
        given = {
            **QUIET,
            "CUDA_VISIBLE_DEVICES": ",".join(str(number_of(gpu)) for gpu in gpus),
            "LD_LIBRARY_PATH": runner.cuda_libraries(),
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
        }
        if not is_there("flashinfer"):
            given["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
        return {**given, **(more or {})}

    def start(
        self,
        label: str,
        command: Sequence[str],
        tenant: str | None,
        env: dict[str, str],
        script: bool = True,
        sites: Sequence[Path] = (),
    ) -> Any:
        """Starts a script that says rows and facts, or another command. A tenant imports from `sites`, then Sublet's package."""
        how: dict[str, Any] = {"tenant": tenant, "env": env, "sites": [*sites, self.job.site()] if tenant else []}
        child: Any = runner.Child if script else runner.Process
        process = child(self.work, label, list(command), **how)
        self.started.append(process)
        return process

    def stop(self) -> None:
        """Ends what still runs."""
        for process in self.started:
            if not process.ended:
                common.stop_child(process.process, grace_s=8.0)

    def command(self, *words: str) -> dict[str, Any]:
        """Runs `sublet`; a record of what it said. A failure is a failed check."""
        told = cli.sublet(*words, "--json", timeout_s=self.left_s(120))
        if told["exit"] != 0:
            self.record.check(f"sublet {' '.join(words)}", False, cli.say(told) + str(told.get("json"))[:600])
        return told

    def used(self, gpus: Sequence[int]) -> int:
        """The most MiB in use on one of these GPUs."""
        return max(self.used_each(gpus))

    def used_each(self, gpus: Sequence[int]) -> list[int]:
        """The MiB in use on each of these GPUs."""
        found = common.used_mib()
        return [found[number_of(gpu)] for gpu in gpus]

    def pause_often(
        self,
        tenant: str,
        gpus: Sequence[int],
        count: int,
        deep: int,
        over: Callable[[], bool] = lambda: False,
        hold_s: tuple[float, float] = (0.05, 0.4),
        reserve_s: float = 25.0,
    ) -> int:
        """Pauses `tenant` `count` times at random instants, `deep` of them deeply; how many succeeded.

        Ends early when `over()`, or when only `reserve_s` are left.
        """
        kinds = [True] * deep + [False] * (count - deep)
        self.random.shuffle(kinds)
        done = failed = 0
        for is_deep in kinds:
            if over() or failed > 3 or self.end - time.monotonic() < reserve_s:
                break
            time.sleep(self.random.uniform(0.02, 0.9))
            kind = "deep_" if is_deep else ""
            told = self.command("pause", tenant, *(["--deep"] if is_deep else []))
            failed += told["exit"] != 0
            if told["exit"] not in (0, 3):
                continue
            left = self.used_each(gpus)
            self.record.sample(f"{kind}left_mib", max(left))
            for gpu, mib in zip(gpus, left, strict=True):
                self.record.sample(f"{kind}left_mib_gpu{gpu}", mib)
            time.sleep(self.random.uniform(*hold_s))
            again = self.command("resume", tenant)
            if again["exit"] != 0:
                raise JobError(f"resume failed: {cli.say(again)}")
            if told["exit"] == 0:
                done += 1
                self.record.sample(f"{kind}pause_s", round(told["wall_s"], 4))
                self.record.sample(f"{kind}resume_s", round(again["wall_s"], 4))
        self.record.check(f"{count} pauses succeeded, {deep} of them deep", done == count, f"{done} did, {failed} failed")
        return done


# ---------------------------------------------------------------- servers


def ask(port: int, path: str, body: Any = None, timeout_s: float = 120.0, method: str = "") -> tuple[int, str]:
    """Status and text of a request to a server on this machine."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        sent = None if body is None else json.dumps(body)
        link.request(method or ("GET" if body is None else "POST"), path, sent, {"Content-Type": "application/json"})
        answer = link.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        link.close()


def wait_healthy(process: Any, port: int, timeout_s: float) -> float:
    """Waits until a server answers; the seconds it took."""
    began = time.monotonic()

    def ready() -> bool:
        if process.ended:
            raise JobError(f"{process.label} ended with {process.process.returncode}: {process.why()}")
        try:
            return ask(port, "/health", timeout_s=5)[0] == 200
        except OSError:
            return False

    common.wait_until(f"an answer of {process.label}", ready, timeout_s, poll_s=0.1)
    return time.monotonic() - began


def read_stream(port: int, request: dict[str, Any], into: Stream, timeout_s: float) -> None:
    """One streamed completion; notes when each chunk came."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        link.request("POST", "/v1/completions", json.dumps({**request, "stream": True}), {"Content-Type": "application/json"})
        answer = link.getresponse()
        if answer.status != 200:
            into.error = f"status {answer.status}: {answer.read()[:300]!r}"
            return
        for line in answer:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                told = json.loads(line[6:])
                if "choices" not in told:
                    into.error = str(told)[:300]
                    return
                into.times.append(time.monotonic())
                into.text += "".join(choice["text"] for choice in told["choices"])
    except (OSError, ValueError, http.client.HTTPException) as error:
        into.error = f"{type(error).__name__}: {error}"[:300]
    finally:
        link.close()


def start_streams(port: int, requests: Sequence[dict[str, Any]], timeout_s: float) -> tuple[list[Stream], list[threading.Thread]]:
    """Starts so many streams simultaneously; join the threads before reading the texts."""
    streams = [Stream() for _ in requests]
    threads = [
        threading.Thread(target=read_stream, args=(port, request, stream, timeout_s), daemon=True)
        for request, stream in zip(requests, streams, strict=True)
    ]
    for thread in threads:
        thread.start()
    return streams, threads


def join(threads: Sequence[threading.Thread], timeout_s: float) -> None:
    """Waits for streams to end; JobError when one does not."""
    end = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        raise JobError(f"{sum(thread.is_alive() for thread in threads)} streams did not end within {timeout_s:.0f} s")
