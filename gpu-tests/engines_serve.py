"""Rows with servers: streams in flight over pauses, two servers that change places, and SGLang."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import runner
from common import JobError
from engines_tools import (
    Context,
    Stream,
    added_delay,
    answers_differ,
    ask,
    cache_tokens,
    join,
    metric,
    setting,
    short,
    start_streams,
    texts_differ,
    wait_healthy,
)

START_S = 240.0
STREAMS = 8
#: Two of these do not fit on one GPU.
LARGE_SHARE = 0.85
#: Of servers that take turns: vLLM ends where less than this is free at its start.
TURNS_SHARE = 0.8
#: How full the KV caches are made.
FILLED = 0.8
#: Prompts that fill them: as long as the server allows, less what it writes.
PROMPT, LONGEST = 4000, 4096


def serve(ctx: Context, label: str, model: str, share: float, tenant: str | None, **more: Any) -> tuple[Any, int]:
    """Starts `vllm serve` on the first GPU, or by tensor parallel on `gpus`; the process and its port."""
    port, gpus = runner.free_port(), more.get("gpus", [0])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--served-model-name", "model", "--gpu-memory-utilization", str(share)]
    command += ["--max-model-len", str(LONGEST), "--max-num-seqs", "64", *more.get("options", [])]
    command += ["--tensor-parallel-size", str(len(gpus))] if len(gpus) > 1 else []
    process = ctx.start(label, command, tenant, ctx.env(gpus, more.get("env")), script=False)
    ctx.record.sample(f"{label}_start_s", wait_healthy(process, port, ctx.left_s(START_S)))
    return process, port


def request(first: int, length: int, tokens: int) -> dict[str, Any]:
    """A completion of a prompt of its own: token ids from a number on."""
    prompt = [300 + (first * 7919 + index * 31) % 30_000 for index in range(length)]
    return {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def texts(ctx: Context, streams: list[Stream]) -> list[str]:
    """The texts of streams that ended; JobError where one failed."""
    wrong = [stream.error for stream in streams if stream.error]
    if wrong:
        raise JobError(f"{len(wrong)} of {len(streams)} streams failed: {wrong[0]}")
    return [stream.text for stream in streams]


def serve_streams(ctx: Context) -> None:
    """Eight streams in flight; pauses of random length. How much longer than the pause does a client wait?"""
    tokens, rounds = int(setting("STREAM_TOKENS", 800)), int(setting("STREAM_PAUSES", 50))
    same = setting("BATCH_INVARIANT", 0) != 0
    env = {"VLLM_BATCH_INVARIANT": "1"} if same else {}
    tenant, requests = ctx.tenant(), [request(index, 40, tokens) for index in range(STREAMS)]
    process, port = serve(ctx, "serve", str(ctx.job.model(1)), 0.3, tenant, env=env)
    references = []
    # The first of all meets an empty prefix cache.
    for _ in range(3):
        streams, threads = start_streams(port, requests, ctx.left_s())
        join(threads, ctx.left_s(120))
        references.append(texts(ctx, streams))
    alone = texts_differ(references[1], references[2])
    ctx.record.data["baseline"]["texts_that_differ_without_pauses"] = len(alone)
    took = max(stream.times[-1] - stream.times[0] for stream in streams)
    differ = done = compared = 0
    while done < rounds and ctx.left_s() > 30:
        streams, threads = start_streams(port, requests, ctx.left_s())
        pauses = []
        time.sleep(ctx.random.uniform(0.05, took * 0.4))
        while any(thread.is_alive() for thread in threads) and done < rounds and len(pauses) < 3:
            hold_s = ctx.random.uniform(0.1, 3.0)
            if ctx.command("pause", tenant)["exit"] != 0:
                break
            paused = time.monotonic()
            time.sleep(hold_s)
            resumed = time.monotonic()
            told = ctx.command("resume", tenant)
            if told["exit"] != 0:
                raise JobError("the server was not resumed")
            pauses.append((paused, resumed))
            done += 1
            time.sleep(ctx.random.uniform(0.05, 0.5))
        join(threads, ctx.left_s(120))
        differ += len(texts_differ(references[1], texts(ctx, streams)))
        compared += STREAMS
        for paused, resumed in pauses:
            for stream in streams:
                delay = added_delay(stream.times, paused, resumed)
                if delay is not None:
                    ctx.record.sample("added_delay_s", round(delay, 4))
        if not pauses:
            raise JobError("no pause succeeded while streams were in flight")
    delays = ctx.record.data["samples"].get("added_delay_s", [])
    ctx.record.check(f"{rounds} pauses while streams were in flight", done >= rounds and bool(delays), f"{done}, {len(delays)} delays")
    # The batch differs from run to run, and vLLM's sums with it, unless it is told to compute each request alike.
    allowed = 0 if same else (len(alone) + 1) * compared // STREAMS
    told = f"{differ} of {compared} differ; without pauses {len(alone)} of {STREAMS} do"
    ctx.record.check("no more texts differ than in runs without pauses", differ <= allowed, told)
    ctx.job.say(ctx, f"a pause adds {short(delays)} to its length; {differ} texts differ, alone {len(alone)}")


# ---------------------------------------------------------------- two servers


def fill(ctx: Context, port: int, seed: int) -> float:
    """Sends distinct prompts until so much of the KV cache was written; the share that is, counted in tokens."""
    room = cache_tokens(ask(port, "/metrics")[1])
    if not room:
        raise JobError("the server does not say how much its cache holds")
    count = max(1, int(room * setting("FILLED", FILLED) / PROMPT))
    numbers, lock, wrong = iter(range(count)), threading.Lock(), []

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or wrong:
                return
            status, said = ask(port, "/v1/completions", request(seed * 100_000 + number, PROMPT, 1), timeout_s=120)
            if status != 200:
                wrong.append(said[:300])

    threads = [threading.Thread(target=work, daemon=True) for _ in range(32)]
    for thread in threads:
        thread.start()
    join(threads, ctx.left_s(180))
    if wrong:
        raise JobError(f"a prompt that fills the cache failed: {wrong[0]}")
    page = ask(port, "/metrics")[1]
    ctx.record.data.setdefault("caches", []).append(
        {"tokens": room, "prompts": count, "prompt": PROMPT, "in_use_now": metric(page, "vllm:kv_cache_usage_perc")}
    )
    return count * PROMPT / room


class Servers:
    """Two servers of the same GPUs, of which one is there."""

    def __init__(self, ctx: Context, gpus: int = 1) -> None:
        self.ctx, self.gpus = ctx, list(range(gpus))
        self.tenants = [ctx.tenant("a"), ctx.tenant("b")]
        self.ports = [0, 0]
        self.processes: list[Any] = [None, None]
        #: What each may answer: with an empty cache of prefixes, and with a warm one.
        self.texts: list[set[str]] = [set(), set()]

    def start(self, which: int, tenant: str | None = None) -> None:
        """Starts one with the ways to put it to sleep."""
        options, env = {"options": ["--enable-sleep-mode"]}, {"VLLM_SERVER_DEV_MODE": "1"}
        self.begin(which, tenant or self.tenants[which], setting("LARGE_SHARE", LARGE_SHARE), env=env, **options)

    def begin(self, which: int, tenant: str, share: float, **more: Any) -> None:
        """Starts one, and waits until it answers."""
        model, label = str(self.ctx.job.model(which + 1)), f"server_{'ab'[which]}"
        self.processes[which], self.ports[which] = serve(self.ctx, label, model, share, tenant, gpus=self.gpus, **more)

    def begin_both(self) -> None:
        """Starts both at the same time, in tenants that take turns."""
        failed: list[str] = []

        def begin(which: int) -> None:
            try:
                self.begin(which, self.tenants[which], TURNS_SHARE, env={"SUBLET_TURNS": "auto"})
            except (JobError, OSError) as error:
                failed.append(str(error))

        for which in (0, 1):
            self.ctx.job.model(which + 1)
        threads = [threading.Thread(target=begin, args=(which,), daemon=True) for which in (0, 1)]
        for thread in threads:
            thread.start()
        join(threads, self.ctx.left_s(START_S))
        if failed:
            raise JobError(failed[0])

    def first_token(self, which: int, series: str) -> str:
        """Asks for a short answer to the same prompt; notes the time to its first token, and gives the text."""
        began = time.monotonic()
        streams, threads = start_streams(self.ports[which], [request(77, 100, 16)], self.ctx.left_s(60))
        join(threads, self.ctx.left_s(60))
        text = texts(self.ctx, streams)[0]
        self.ctx.record.sample(series, round(streams[0].times[0] - began, 4))
        return text

    def times(self, what: str, count: int, change: Callable[[int], None]) -> int:
        """Has the servers change places `count` times; how many answers were not the right text."""
        wrong = 0
        for index in range(count):
            if self.ctx.left_s() < 40:
                self.ctx.record.check(f"{what}: {count} times", False, f"{index} were done when the time was over")
                return wrong
            to = index % 2
            began = time.perf_counter()
            change(to)
            self.ctx.record.sample(f"{what}_s", round(time.perf_counter() - began, 4))
            wrong += self.first_token(to, f"{what}_first_token_s") not in self.texts[to]
        self.ctx.record.check(f"{what}: the right text after each", wrong == 0, f"{wrong} of {count} are wrong")
        return wrong


def need(told: dict[str, Any]) -> None:
    """JobError where the command failed."""
    if told["exit"] != 0:
        raise JobError(f"sublet {' '.join(told['args'])} failed: {told.get('json') or told.get('stderr')}"[:600])


def swapped(ctx: Context, gpus: int, count: int) -> Servers:
    """Two servers that do not fit together on the same GPUs, caches filled, change places `count` times by `swap`; b is there then."""
    pair = Servers(ctx, gpus)
    for which in (0, 1):
        pair.start(which)
        pair.texts[which].add(pair.first_token(which, "first_first_token_s"))
        share = fill(ctx, pair.ports[which], which + 1)
        ctx.record.sample("filled_share", share)
        for _ in range(5):
            pair.texts[which].add(pair.first_token(which, "warm_first_token_s"))
        ctx.record.sample("used_mib", ctx.used(pair.gpus))
        if which == 0 and ctx.command("pause", pair.tenants[0])["exit"] != 0:
            raise JobError("the first server was not paused")
    # b is there: each first change is to a.
    pair.times("swap", count, lambda to: need(ctx.command("swap", pair.tenants[1 - to], pair.tenants[to])))
    return pair


def say_changes(ctx: Context, ways: Sequence[str]) -> None:
    """The seconds of each way to change places, and of the first tokens after it."""
    samples = ctx.record.data["samples"]
    for what in ways:
        seconds, first = samples.get(f"{what}_s", []), samples.get(f"{what}_first_token_s", [])
        ctx.job.say(ctx, f"{what} {short(seconds)}, then first token {short(first)}")


def two_servers(ctx: Context) -> None:
    """Two servers that do not fit together, caches filled, change places by `swap`, by `switch`, by vLLM's sleep, by restart."""
    # Even, so that b is there after them.
    count = 2 * int(setting("SWAPS", 20) / 2)
    pair = swapped(ctx, 1, count)
    pair.times("switch", count, lambda to: need(ctx.command("switch", pair.tenants[to])))
    asleep_rows(ctx, pair, count)
    restart(ctx, pair)
    say_changes(ctx, ("swap", "switch", "sleep_wake", "restart"))


def servers4(ctx: Context) -> None:
    """Two servers by tensor parallel on the same four GPUs change places by `swap`. How long until the first token?"""
    swapped(ctx, 4, 2 * int(setting("SWAPS", 10) / 2))
    say_changes(ctx, ("swap",))


def two_auto_tp2(ctx: Context) -> None:
    """The same by tensor parallel on two GPUs: NCCL's memory and that of captures does not wait for a turn."""
    two_auto(ctx, 2)


def two_auto(ctx: Context, gpus: int = 1) -> None:
    """Two servers of 0.8 of the GPU each, started at the same time, answer by turns. Does each have the cache that it would have alone?"""
    count, pair = 2 * int(setting("TURNS", 20) / 2), Servers(ctx, gpus)
    pair.begin_both()
    for which in (0, 1):
        room = cache_tokens(ask(pair.ports[which], "/metrics")[1])
        ctx.record.data.setdefault("caches", []).append({"server": "ab"[which], "tokens": room})
        for _ in range(3):
            pair.texts[which].add(pair.first_token(which, "warm_first_token_s"))
        ctx.record.sample("used_mib", ctx.used(pair.gpus))
    # A request alone changes the places.
    pair.times("turn", count, lambda _to: None)
    answered = [ask(port, "/health")[0] for port in pair.ports]
    ctx.record.check("both servers are there at the end", answered == [200, 200], str(answered))
    sizes = [each["tokens"] for each in ctx.record.data["caches"]]
    first = short(ctx.record.data["samples"].get("turn_first_token_s", []))
    ctx.job.say(ctx, f"started together in {short(ctx.record.data['samples'].get('server_a_start_s', []))}; first token after a turn {first}; caches {sizes}")


def asleep_rows(ctx: Context, pair: Servers, count: int) -> None:
    """vLLM's own sleep of one and wake-up of the other, level 1; its cache is lost."""

    def post(which: int, path: str) -> None:
        status, said = ask(pair.ports[which], path, {}, timeout_s=ctx.left_s(60))
        if status != 200:
            raise JobError(f"{path} of server {'ab'[which]}: {status} {said[:300]}")

    # b is there, and a paused as a whole: it comes back for good once b sleeps. The first change is to a.
    post(1, "/sleep?level=1")
    if ctx.command("resume", pair.tenants[0])["exit"] != 0:
        raise JobError("the other server does not come back next to one that sleeps")
    post(0, "/sleep?level=1")
    post(1, "/wake_up")

    def change(to: int) -> None:
        post(1 - to, "/sleep?level=1")
        post(to, "/wake_up")

    pair.times("sleep_wake", count, change)


def restart(ctx: Context, pair: Servers) -> None:
    """Ends the servers and starts one again, with what it compiled before."""
    ctx.stop()
    began = time.perf_counter()
    pair.start(0, ctx.tenant("again"))
    ctx.record.sample("restart_s", round(time.perf_counter() - began, 3))
    pair.first_token(0, "restart_first_token_s")


# ---------------------------------------------------------------- SGLang


def sglang(ctx: Context) -> None:
    """SGLang's release and resume through the alias, then whole pauses in flight, NCCL as SGLang sets it."""
    gpus = list(range(min(2, ctx.job.gpus)))
    port, tenant = runner.free_port(), ctx.tenant()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(ctx.job.model(1)), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--tp-size", str(len(gpus)), "--mem-fraction-static", "0.5", "--enable-memory-saver"]
    command += ["--attention-backend", ctx.job.args.sglang_attention, "--sampling-backend", "pytorch", "--grammar-backend", "none"]
    command += ["--enable-deterministic-inference"] if setting("SGLANG_DETERMINISTIC", 0) else []
    command += os.environ.get("ENGINES_SGLANG_OPTIONS", "").split()
    # Its own pins, where what is installed is newer than it can do with.
    pins = [Path(folder) for folder in os.environ.get("ENGINES_SGLANG_SITES", "").split(":") if folder]
    sites = [ctx.job.site() / "sublet" / "alias", *pins]
    process = ctx.start("sglang", command, tenant, ctx.env(gpus), script=False, sites=sites)
    wait_healthy(process, port, ctx.left_s(START_S))
    body = {
        "input_ids": request(5, 64, 1)["prompt"],
        "sampling_params": {"temperature": 0, "max_new_tokens": int(setting("TOKENS", 600)), "ignore_eos": True},
        "return_logprob": True,
    }

    def once() -> dict[str, Any]:
        status, said = ask(port, "/generate", body, timeout_s=ctx.left_s(120))
        if status != 200:
            raise JobError(f"/generate: {status} {said[:300]}")
        told = json.loads(said)
        return {"tokens": told["output_ids"], "logprobs": told["meta_info"]["output_token_logprobs"]}

    def under_pauses(when: str, count: int) -> None:
        # The first meets an empty prefix cache, which alone changes the sums.
        once()
        expected = once()
        differ = [text for _ in range(2) if (text := answers_differ(expected, once()))]
        ctx.record.check(f"{when}: the engine answers the same each time", not differ, str(differ[:1]))
        stop, answers = threading.Event(), []

        def work() -> None:
            while not stop.is_set():
                try:
                    answers.append(answers_differ(expected, once()))
                except (OSError, JobError) as error:
                    answers.append(f"failed: {error}")
                    return

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        ctx.pause_often(tenant, gpus, count, 0, lambda: process.ended)
        stop.set()
        join([thread], ctx.left_s(60))
        wrong = [text for text in answers if text]
        told = f"{len(wrong)} of {len(answers)} differ: {wrong[:3]}; then {answers_differ(expected, once())!r}"
        ctx.record.check(f"{when}: every answer in which pauses came is the same", bool(answers) and not wrong, told)

    pauses = int(setting("SGLANG_PAUSES", 50))
    under_pauses("before releases", pauses // 2)
    before = ctx.used(gpus)
    for _ in range(int(setting("SLEEPS", 5))):
        for path, series in (("/release_memory_occupation", "release_s"), ("/resume_memory_occupation", "resume_again_s")):
            began = time.perf_counter()
            status, said = ask(port, path, {}, timeout_s=ctx.left_s(60))
            ctx.record.sample(series, time.perf_counter() - began)
            if status != 200:
                raise JobError(f"{path}: {status} {said[:300]}")
            if series == "release_s":
                ctx.record.sample("released_left_mib", ctx.used(gpus))
    left = ctx.record.data["samples"]["released_left_mib"]
    ctx.record.check("a release gives memory back", max(left) < before / 2, f"{max(left)} of {before} MiB are left")
    under_pauses("behind releases", pauses - pauses // 2)
    samples = ctx.record.data["samples"]
    paused = f"pause {short(samples.get('pause_s', []))}, {max(samples.get('left_mib', [0]))} MiB left"
    ctx.job.say(ctx, f"release {short(samples['release_s'])}, {max(left)} MiB left; {paused}")
