"""Do real inference and training engines come through pauses with the same bits, and what does a pause cost their users?

One row a question, each with a deadline and a record of its own. A row is NOT RUN, by name, where its engine is not
installed or the machine has too few GPUs; that is no failure. Engines are as published; the model has random weights.

- offline_fork, offline_spawn: `LLM` of vLLM in a script, paused at 50 random instants, 10 of them deep: every token and
  log-probability of one request at a time, against a run without Sublet. offline_uncached, offline_lora, offline_ngram:
  without prefix cache, with an adapter, with ngram decoding.
- serve_streams: 8 streams of `vllm serve`; how much longer than a pause a client waits.
- sleep: vLLM's own sleep against the drop-in. tp2, tensor4: two and four GPUs by tensor parallel, 5 deep. experts4: a mixture
  of experts on four GPUs by expert parallel, 5 deep.
- two_servers: servers that do not fit together, caches filled, change places by swap, switch, vLLM's sleep, a restart.
- servers4: two such servers of four GPUs each change places on the same four, by swap.
- two_auto: two servers of 0.8 of a GPU, started at the same time with `SUBLET_TURNS=auto`, answer by turns. two_auto_tp2: on two GPUs.
- sglang: its release of memory through the alias, and whole pauses.
- grpo_trl: TRL's GRPO with vLLM in its process; grpo_two: the same as one job of two processes.
- verl: verl's GRPO, a trainer by FSDP and vLLM on the same GPUs, by Ray. fsdp4: the same with FSDP2 on four GPUs, and engines of two GPUs
  each.
- zero3, megatron: training on two ranks.

Bound: a pause copies what changed since the last, at 50 GB/s: 0.2 s for a server whose cache is small, 2.4 s for a full one
of 119 GiB; a deep one takes 0.5 s more. A start of an engine takes 20 to 50 s, so no row is shorter than two of them.
`ENGINES_PAUSES`, `ENGINES_DEEP`, `ENGINES_SWAPS` and the others that `setting` reads fit it to the time there is.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import engines_offline
import engines_serve
import engines_tools
import engines_train
import engines_verl
import runner
from common import JobError, Result
from engines_tools import PROGRAMS, Context
from suite import RecordedSuite, Row, main, options

VLLM = ("torch", "transformers", "vllm")
VERL = (*VLLM, "verl", "ray", "transfer_queue", "pyarrow")
ROWS = (
    Row("offline_fork", engines_offline.offline_fork, VLLM, limit_s=330),
    Row("offline_spawn", engines_offline.offline_spawn, VLLM, limit_s=330),
    Row("offline_uncached", engines_offline.variant_row("uncached"), VLLM, limit_s=270),
    Row("offline_lora", engines_offline.variant_row("lora"), VLLM, limit_s=270),
    Row("offline_ngram", engines_offline.variant_row("ngram"), VLLM, limit_s=270),
    Row("serve_streams", engines_serve.serve_streams, VLLM, limit_s=420),
    Row("sleep", engines_offline.sleep, VLLM, limit_s=330),
    Row("two_servers", engines_serve.two_servers, VLLM, limit_s=560),
    Row("two_auto", engines_serve.two_auto, VLLM, limit_s=300),
    Row("two_auto_tp2", engines_serve.two_auto_tp2, VLLM, gpus_min=2, limit_s=330),
    Row("tp2", engines_offline.tp2, VLLM, gpus_min=2, limit_s=360),
    Row("tensor4", engines_offline.tensor4, VLLM, gpus_min=4, limit_s=420),
    Row("experts4", engines_offline.experts4, VLLM, gpus_min=4, limit_s=420),
    Row("servers4", engines_serve.servers4, VLLM, gpus_min=4, limit_s=560),
    Row("sglang", engines_serve.sglang, ("torch", "transformers", "sglang", "sgl_kernel"), limit_s=400),
    Row("grpo_trl", engines_train.grpo_trl, (*VLLM, "trl", "datasets", "accelerate"), limit_s=570),
    Row("grpo_two", engines_train.grpo_two, (*VLLM, "trl", "datasets", "accelerate"), gpus_min=2, limit_s=570),
    Row("verl", engines_verl.verl, VERL, limit_s=570),
    Row("fsdp4", engines_verl.fsdp4, VERL, gpus_min=4, limit_s=570),
    Row("zero3", engines_train.zero3, ("torch", "deepspeed"), gpus_min=2, limit_s=240),
    Row("megatron", engines_train.megatron, ("torch", "megatron.core"), gpus_min=2, limit_s=240),
)

parse = options(
    __doc__, 560, rows=("", "only rows with one of these words in their names, by comma"), seed=(1, "of the instants"),
    size=("1.7b", "of the model, as engine_model.py names it"),
    grpo_modes=("", "only these modes of grpo_trl, grpo_two, verl and fsdp4, by comma"), sglang_attention=("triton", "SGLang's attention"),
)


class Engines(RecordedSuite):
    """All rows, one after the other."""

    HEAD = ("row", "ok", "seconds", "what")
    LEAST_S = 60.0

    def __init__(self, rows: Sequence[Row], args: Any, result: Result, work: Path) -> None:
        super().__init__(rows, args, result, work)
        self.references: dict[Any, Any] = {}
        self.current: Context | None = None
        result.data["versions"].update(engines_tools.versions())
        common.at_deadline(self.expired)

    def expired(self, reason: str) -> None:
        """Keeps what the row under way has so far."""
        if self.current is not None:
            self.current.record.note(reason)
            self.current.record.finish("deadline")

    def line(self, row: Row, ok: str, what: str, seconds: str = "-") -> None:
        self.table.append((row.name, ok, seconds, what))

    def watch(self, row: Row) -> None:
        """Runs a row, which has a record of its own."""
        work = self.work / row.name
        work.mkdir()
        began = time.monotonic()
        record = Result(self.args.out, f"engines_{row.name}", {"row": row.name, "gpus": row.gpus_min, "size": self.args.size})
        record.data["versions"].update(engines_tools.versions())
        self.current = ctx = Context(self, row.name, min(row.limit_s, self.left_s()), record, work)

        def body() -> None:
            try:
                row.run(ctx)
            finally:
                ctx.stop()
                self.current = None

        wrong = self.play(record, work, body)
        record.finish()
        for entry in wrong:
            self.result.check(f"{row.name}: {entry['what']}", False, entry["detail"])
        if not wrong:
            self.result.check(f"{row.name}: {len(record.data['checks'])} checks", True)
        self.data["rows"][row.name] = {"status": record.data["status"], "record": record.name}
        said = f"{wrong[0]['what']}: {wrong[0]['detail']}"[:110] if wrong else f"{len(record.data['checks'])} checks"
        self.line(row, "FAIL" if wrong else "ok", said, f"{time.monotonic() - began:.0f}")

    # ------------------------------------------------------------ what rows share

    def say(self, ctx: Context, text: str) -> None:
        """A line of the table under a row, and a note of its record."""
        ctx.record.data["notes"].append(text)
        self.table.append((ctx.name, "", "", text))
        common.log(f"{ctx.name}: {text}")

    def site(self) -> Path:
        """The folder with Sublet's Python package, which processes under Sublet import from first."""
        return runner.package(self.work, "sublet")

    def model(self, seed: int, size: str = "") -> Path:
        """The folder of the model with these random weights, made at its first use: that of the job's size, or another."""
        folder = self.work / f"model{seed}{size}"
        if not folder.exists():
            command = [sys.executable, str(PROGRAMS / "engine_model.py"), str(folder), "--size", size or self.args.size]
            command += ["--seed", str(seed), *([] if size else ["--lora", str(self.work / "adapter")])]
            env = common.child_env(engines_tools.QUIET)
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise JobError(f"no model was made: {done.stderr[-600:]}")
        return folder

    def adapter(self) -> Path:
        self.model(1)
        return self.work / "adapter"


if __name__ == "__main__":
    main(parse, "engines", lambda *given: Engines(ROWS, *given).run())
