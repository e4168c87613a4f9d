"""Do real inference and training engines come through pauses with the same bits, and what does a pause cost their users?

One row a question, each with a deadline and a record of its own. A row is NOT RUN, by name, where its engine is not
installed or the machine has too few GPUs; that is no failure. Engines are as published; the model has random weights.

- offline_fork, offline_spawn: `LLM` of vLLM in a script, paused at 50 random instants, 10 of them deep: every token and
  log-probability of one request at a time, against a run without Sublet. offline_uncached, offline_lora, offline_ngram:
  without prefix cache, with an adapter, with ngram decoding.
- serve_streams: 8 streams of `vllm serve`; how much longer than a pause a client waits.
- sleep: vLLM's own sleep against the drop-in. tp2: two GPUs, 5 deep.
- two_servers: servers that do not fit together, caches filled, change places by swap, switch, vLLM's sleep, a restart.
- sglang: its release of memory through the alias, and whole pauses.
- grpo_trl: TRL's GRPO with vLLM in its process; grpo_two: the same as one job of two processes.
- verl: verl's GRPO, a trainer by FSDP and vLLM on the same GPUs, by Ray.
- zero3, megatron: training on two ranks.

Bound: a pause copies what changed since the last, at 50 GB/s: 0.2 s for a server whose cache is small, 2.4 s for a full one
of 119 GiB; a deep one takes 0.5 s more. A start of an engine takes 20 to 50 s, so no row is shorter than two of them.
`ENGINES_PAUSES`, `ENGINES_DEEP`, `ENGINES_SWAPS` and the others that `setting` reads fit it to the time there is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from training_run import gpu_count

NOT_RUN = "NOT RUN: "
#: Seconds that must be left, or a row is not begun.
ROW_S_MIN = 60.0


@dataclass(frozen=True)
class Row:
    """A question about an engine."""

    name: str
    #: Modules that must be there.
    needs: tuple[str, ...]
    run: Callable[[Context], None]
    limit_s: float = 240.0
    gpus_min: int = 1


VLLM = ("torch", "transformers", "vllm")
ROWS = (
    Row("offline_fork", VLLM, engines_offline.offline_fork, 330),
    Row("offline_spawn", VLLM, engines_offline.offline_spawn, 330),
    Row("offline_uncached", VLLM, engines_offline.variant_row("uncached"), 270),
    Row("offline_lora", VLLM, engines_offline.variant_row("lora"), 270),
    Row("offline_ngram", VLLM, engines_offline.variant_row("ngram"), 270),
    Row("serve_streams", VLLM, engines_serve.serve_streams, 420),
    Row("sleep", VLLM, engines_offline.sleep, 330),
    Row("two_servers", VLLM, engines_serve.two_servers, 560),
    Row("tp2", VLLM, engines_offline.tp2, 360, gpus_min=2),
    Row("sglang", ("torch", "transformers", "sglang", "sgl_kernel"), engines_serve.sglang, 400),
    Row("grpo_trl", (*VLLM, "trl", "datasets", "accelerate"), engines_train.grpo_trl, 570),
    Row("grpo_two", (*VLLM, "trl", "datasets", "accelerate"), engines_train.grpo_two, 570, gpus_min=2),
    Row("verl", (*VLLM, "verl", "ray", "transfer_queue", "pyarrow"), engines_verl.verl, 570),
    Row("zero3", ("torch", "deepspeed"), engines_train.zero3, 240, gpus_min=2),
    Row("megatron", ("torch", "megatron.core"), engines_train.megatron, 240, gpus_min=2),
)


def parse(argv: list[str]) -> argparse.Namespace:
    """The options."""
    parser = common.job_parser(__doc__, deadline_s=560)
    parser.add_argument("--rows", default="", help="only rows with one of these words in their names, by comma")
    parser.add_argument("--seed", type=int, default=1, help="of the instants")
    parser.add_argument("--size", default="1.7b", help="of the model, as engine_model.py names it")
    parser.add_argument("--grpo-modes", default="", help="only these modes of grpo_trl, grpo_two and verl, by comma")
    parser.add_argument("--sglang-attention", default="triton", help="SGLang's attention")
    return parser.parse_args(argv)


class Engines(runner.Rows):
    """All rows, one after the other."""

    def __init__(self, rows: Sequence[Row], args: argparse.Namespace, result: Result, work: Path) -> None:
        self.rows, self.args, self.result, self.work = rows, args, result, work
        self.gpus = gpu_count(args.gpus)
        self.began = time.monotonic()
        self.references: dict[Any, Any] = {}
        self.table: list[tuple[str, ...]] = [("row", "ok", "seconds", "what")]
        self.current: Context | None = None
        result.data["rows"] = {}
        result.data["versions"].update(engines_tools.versions())
        common.at_deadline(self.expired)

    def expired(self, reason: str) -> None:
        """Keeps what the row under way has so far."""
        if self.current is not None:
            self.current.record.note(reason)
            self.current.record.finish("deadline")

    def one(self, row: Row) -> None:
        """A row; whatever becomes of it, the next has its turn."""
        absent = [name for name in row.needs if not engines_tools.importable(name)]
        if absent:
            self.not_run(row, f"no {' and no '.join(absent)} here")
        elif self.gpus < row.gpus_min:
            self.not_run(row, f"it wants {row.gpus_min} GPUs, and {self.gpus} is here")
        elif self.left_s() < ROW_S_MIN:
            self.result.check(f"{row.name}: had its turn", False, f"{self.left_s():.0f} s were left")
            self.table.append((row.name, "FAIL", "-", "no time was left"))
        else:
            self.watch(row)

    def watch(self, row: Row) -> None:
        """Runs a row, which has a record of its own."""
        common.log(f"---- {row.name}")
        work = self.work / row.name
        work.mkdir()
        began = time.monotonic()
        record = Result(self.args.out, f"engines_{row.name}", {"row": row.name, "gpus": row.gpus_min, "size": self.args.size})
        record.data["versions"].update(engines_tools.versions())
        self.current = ctx = Context(self, row.name, min(row.limit_s, self.left_s()), record, work)
        try:
            row.run(ctx)
        except JobError as error:
            record.check("the row came to its end", False, str(error))
        except Exception as error:
            record.check("the row came to its end", False, f"{type(error).__name__}: {error}")
        finally:
            ctx.stop()
            self.current = None
            for path in work.glob("*.log"):
                path.replace(self.work / f"{row.name}-{path.name}")
        record.finish()
        wrong = [entry for entry in record.data["checks"] if not entry["passed"]]
        for entry in wrong:
            self.result.check(f"{row.name}: {entry['what']}", False, entry["detail"])
        if not wrong:
            self.result.check(f"{row.name}: {len(record.data['checks'])} checks", True)
        self.result.data["rows"][row.name] = {"status": record.data["status"], "record": record.name}
        seconds = f"{time.monotonic() - began:.0f}"
        said = f"{wrong[0]['what']}: {wrong[0]['detail']}"[:110] if wrong else f"{len(record.data['checks'])} checks"
        self.table.append((row.name, "FAIL" if wrong else "ok", seconds, said))

    def not_run(self, row: Row, why: str) -> None:
        """A row that this machine cannot run."""
        self.result.data["rows"][row.name] = {"status": "not run", "why": why}
        self.result.note(f"{row.name}: {NOT_RUN}{why}")
        print(f"{NOT_RUN}{row.name}: {why}", flush=True)
        self.table.append((row.name, "-", "-", f"{NOT_RUN}{why}"))

    # ------------------------------------------------------------ what rows share

    def say(self, ctx: Context, text: str) -> None:
        """A line of the table under a row, and a note of its record."""
        ctx.record.data["notes"].append(text)
        self.table.append((ctx.name, "", "", text))
        common.log(f"{ctx.name}: {text}")

    def site(self) -> Path:
        """The folder with Sublet's Python package, which processes under Sublet import from first."""
        return runner.package(self.work, "sublet")

    def model(self, seed: int) -> Path:
        """The folder of the model with these random weights, made at its first use."""
        folder = self.work / f"model{seed}"
        if not folder.exists():
            command = [sys.executable, str(PROGRAMS / "engine_model.py"), str(folder), "--size", self.args.size]
            command += ["--seed", str(seed), "--lora", str(self.work / "adapter")]
            env = common.child_env(engines_tools.QUIET)
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
            if done.returncode != 0:
                raise JobError(f"no model was made: {done.stderr[-600:]}")
        return folder

    def adapter(self) -> Path:
        """The folder of the adapter."""
        self.model(1)
        return self.work / "adapter"


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    sys.exit(common.run_job(options, "engines", lambda *given: Engines(ROWS, *given).run()))
