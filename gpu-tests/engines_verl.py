"""The rows `verl` and `fsdp4`: verl's GRPO with an FSDP actor and vLLM on the same GPUs, whole-tenant pauses at random instants.

The program is `python -m verl.trainer.main_ppo` as published. Ray starts everything: on each GPU one process trains and another
generates, and weights pass between them by CUDA IPC at each step. All of it is one tenant. Modes as in `engines_train`: twice
without Sublet, then with it and paused. Seeds are fixed, so a paused run must have the rewards, losses and norms of gradients of a run
without Sublet. Where two runs without Sublet differ, its rewards must be as near as twice those two are.

Bound: the start of a trainer and of two engines is most of a mode: 160 to 250 s, mostly imports. A step is 32 answers of 256
tokens, some 9 s. So one mode is 300 s; give each a run of its own, with BEFORE.
`fsdp4` has FSDP2 on four GPUs, and engines of ENGINES_VERL_TP GPUs each: 2, so two engines, or 4. What a step of an unpaused mode is
longer than one of `alone`, in which verl's engine sleeps by itself, is a share of `alone`.
Pauses begin when the first step is done.
`ENGINES_VERL_...`: STEPS, PAUSES, DEEP, PROMPTS, ANSWERS (to each prompt), TOKENS, SHARE (of the GPU for vLLM), EAGER, INVARIANT
(kernels of vLLM whose bits do not depend on the batch), OFFLOAD (verl's own, of the trainer to the host), BEFORE (the record of an
earlier run of this row, whose modes are compared with those of this one: all of them take longer than one run may).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import common
from common import JobError
from engines_figures import FIGURES, first_difference, lost_share, read_steps, spread
from engines_tools import PROGRAMS, Context, setting, short

STEPS, PAUSES, DEEP = 8, 10, 2
PROMPTS, ANSWERS, WORDS, TOKENS, SHARE = 4, 8, 128, 256, 0.3
#: Seconds until the first step is begun: Ray, imports in some 15 processes, the trainer, vLLM with torch.compile and graphs.
START_S = 420.0
#: Name, drop-ins, whether under Sublet, and whether paused as a whole.
Mode = tuple[str, str, bool, bool]
MODES: tuple[Mode, ...] = (
    ("alone", "", False, False),
    ("alone_again", "", False, False),
    ("own", "", True, False),
    ("own_paused", "", True, True),
    ("dropin", "verl,vllm", True, False),
    ("dropin_paused", "verl,vllm", True, True),
)


@dataclass(frozen=True)
class Layout:
    """How a trainer and its engines lie on GPUs."""

    gpus: int
    #: GPUs of each engine.
    tensor: int = 1
    strategy: str = "fsdp"


#: What runs where no mode is named.
USUAL = ("alone", "alone_again", "own_paused")


def number(name: str, usual: float) -> int:
    """A whole number of this row from the environment, or the usual one."""
    return int(setting(f"VERL_{name}", usual))


def settings(model: Path, data: Path, ray: Path, layout: Layout) -> dict[str, Any]:
    """verl's settings. A name with `+` is one that its files do not have."""
    prompts, micro = number("PROMPTS", PROMPTS), 4
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    offload = bool(number("OFFLOAD", 0))
    return {
        "data.train_files": data / "train.parquet",
        "data.val_files": data / "train.parquet",
        "data.train_batch_size": prompts,
        "data.max_prompt_length": WORDS + 64,
        "data.max_response_length": number("TOKENS", TOKENS),
        "data.shuffle": False,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        # Deterministic, and there without a package of kernels.
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.model.use_remove_padding": False,
        f"{actor}.strategy": layout.strategy,
        f"{actor}.fsdp_config.strategy": layout.strategy,
        f"{actor}.optim.lr": 1e-5,
        f"{actor}.ppo_mini_batch_size": prompts,
        f"{actor}.ppo_micro_batch_size_per_gpu": micro,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.fsdp_config.full_determinism": True,
        f"{actor}.fsdp_config.param_offload": offload,
        f"{actor}.fsdp_config.optimizer_offload": offload,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": number("ANSWERS", ANSWERS),
        f"{rollout}.tensor_model_parallel_size": layout.tensor,
        f"{rollout}.gpu_memory_utilization": setting("VERL_SHARE", SHARE),
        f"{rollout}.max_model_len": WORDS + 128 + number("TOKENS", TOKENS),
        f"{rollout}.max_num_seqs": 64,
        f"{rollout}.enforce_eager": bool(number("EAGER", 0)),
        f"{rollout}.enable_prefix_caching": False,
        f"{rollout}.ignore_eos": True,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": micro,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 512,
        f"{rollout}.agent.num_workers": 2,
        f"{rollout}.agent.default_agent_loop": "seeded",
        f"{rollout}.agent.agent_loop_config_path": data / "loops.yaml",
        "algorithm.adv_estimator": "grpo",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": PROGRAMS / "engine_verl.py",
        "trainer.v1.sampler.custom_sampler.path": PROGRAMS / "verl_parts.py",
        "trainer.v1.sampler.custom_sampler.name": "OrderedBuffer",
        "trainer.logger": "[console,file]",
        "trainer.project_name": "engines",
        "trainer.experiment_name": "verl",
        "trainer.default_local_dir": ray / "checkpoints",
        "trainer.n_gpus_per_node": layout.gpus,
        "trainer.nnodes": 1,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        "trainer.total_epochs": 1,
        "trainer.total_training_steps": number("STEPS", STEPS),
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": layout.gpus,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.object_store_memory": 2 << 30,
        "+ray_kwargs.ray_init._temp_dir": ray,
        "hydra.run.dir": ray / "hydra",
        "hydra.output_subdir": "null",
    }


def command(given: dict[str, Any]) -> list[str]:
    """The trainer's command line."""
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in given.items())]


def environment(ctx: Context, gpus: list[int], figures: Path, invariant: bool) -> dict[str, str]:
    """What Ray's processes inherit."""
    more = {
        # verl takes its seeds, loop and order from there.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROGRAMS), *map(str, common.FOLDERS), os.environ.get("PYTHONPATH")])),
        "VERL_FILE_LOGGER_PATH": str(figures),
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        "RAY_DEDUP_LOGS": "0",
        # The memory of a virtual machine may grow with its use: what is left says nothing.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_prestart_worker_first_driver": "0",
        "VLLM_DISABLE_COMPILE_CACHE": "0",
        "VLLM_BATCH_INVARIANT": str(int(invariant)),
        # verl's default for its servers is 0, under which a pause takes longer.
        "NCCL_CUMEM_ENABLE": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        # A machine without a network has no other address.
        "VLLM_HOST_IP": "127.0.0.1",
        "NO_PROXY": "*",
        "no_proxy": "*",
    }
    given = ctx.env(gpus, more)
    for name in ("RAY_ADDRESS", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        given[name] = ""
    return given


# ---------------------------------------------------------------- the row


class Run:
    """One training, from its start to its end."""

    def __init__(self, ctx: Context, mode: Mode, layout: Layout, invariant: bool) -> None:
        name, dropins, under, _ = mode
        self.name = name
        self.tenant = ctx.tenant(name.replace("_", "-")) if under else None
        self.figures = ctx.work / f"{name}.jsonl"
        self.figures.unlink(missing_ok=True)
        # Ray's sockets lie there, and a socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
        more = environment(ctx, list(range(layout.gpus)), self.figures, invariant)
        if under:
            more |= {"SUBLET_REQUIRED": "1"} | ({"SUBLET_COMPAT": dropins} if dropins else {})
        given = settings(ctx.job.model(1), data(ctx), self.folder, layout)
        self.began, self.over = time.monotonic(), False
        self.process = ctx.start(name, command(given), self.tenant, more, script=False)
        common.at_deadline(lambda _reason: self.stop())

    def wait(self, what: str, ready: Any, timeout_s: float) -> None:
        """Waits until `ready()`; JobError when the trainer ends before, or is late."""

        def come() -> bool:
            if ready():
                return True
            if self.process.ended:
                raise JobError(f"{self.name} ended with {self.process.process.returncode} before {what}: {self.process.why()}")
            return False

        try:
            common.wait_until(f"{what} of {self.name}", come, timeout_s, poll_s=0.1)
        except JobError:
            self.process.show(f"no {what}")
            raise

    def steps(self) -> list[dict[str, float]]:
        """The figures of the steps that are done."""
        return read_steps(self.figures)

    def stop(self) -> None:
        """Ends what it started, and removes Ray's folder."""
        if self.over:
            return
        self.over = True
        count = common.end_session(self.process.process.pid)
        if count:
            common.log(f"{self.name}: {count} processes were left, and ended")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.process.wait(5)
        shutil.rmtree(self.folder, ignore_errors=True)


def data(ctx: Context) -> Path:
    """The folder of the prompts, made at its first use."""
    folder = ctx.work / "data"
    if not folder.exists():
        rows = max(96, number("PROMPTS", PROMPTS) * (number("STEPS", STEPS) + 2))
        made = [sys.executable, str(PROGRAMS / "engine_verl.py"), str(folder), "--prompts", str(rows), "--words", str(WORDS)]
        done = subprocess.run(made, env=common.child_env(), capture_output=True, text=True, timeout=90, check=False)
        if done.returncode != 0:
            raise JobError(f"no prompts were made: {done.stderr[-600:]}")
    return folder


def train(ctx: Context, mode: Mode, layout: Layout, invariant: bool) -> dict[str, Any]:
    """Trains in one mode; its figures."""
    name, steps = mode[0], number("STEPS", STEPS)
    run = Run(ctx, mode, layout, invariant)
    try:
        # verl opens this file when all is started.
        run.wait("its start", run.figures.exists, ctx.left_s(START_S))
        start_s = round(time.monotonic() - run.began, 1)
        # Much of the first step is imports of the processes that ask the engine.
        run.wait("one step", run.steps, ctx.left_s(180))
        if run.tenant and mode[3]:
            gpus = list(range(layout.gpus))
            ctx.pause_often(run.tenant, gpus, number("PAUSES", PAUSES), number("DEEP", DEEP), lambda: len(run.steps()) >= steps - 1)
        run.wait(f"{steps} steps", lambda: len(run.steps()) >= steps, ctx.left_s(240))
        run.wait("its end", lambda: run.process.ended, ctx.left_s(60))
        code = run.process.process.returncode
        ctx.record.check(f"{name}: ended by itself", code == 0, "" if code == 0 else f"exit {code}: {run.process.why()}")
        done = run.steps()
    finally:
        run.stop()
    told = {what: [step.get(what) for step in done] for what in FIGURES}
    made = len(done) == steps and any(told["grad_norm"])
    ctx.record.check(f"{name}: all steps were made, and their answers differ", made, str(told)[:300])
    ctx.record.data["samples"][f"{name}_step_s"] = told["step_s"]
    return {"start_s": start_s, **told}


def earlier(path: str) -> dict[str, Any]:
    """The figures of each mode in the record of an earlier run; none without a path."""
    records = json.loads(Path(path).read_text()) if path else []
    return next((record["results"] for record in records if "results" in record), {})


def verl(ctx: Context) -> None:
    """The same seeds in each mode, on two GPUs where there are two."""
    modes(ctx, Layout(min(2, ctx.job.gpus)))


def fsdp4(ctx: Context) -> None:
    """The same with FSDP2 on four GPUs, and engines by tensor parallel on them."""
    modes(ctx, Layout(4, number("TP", 2), "fsdp2"))


def modes(ctx: Context, layout: Layout) -> None:
    """Trains in each mode, and compares."""
    named = [name for name in str(ctx.args.grpo_modes).split(",") if name] or USUAL
    invariant, results = bool(number("INVARIANT", 1)), earlier(os.environ.get("ENGINES_VERL_BEFORE", ""))
    for mode in MODES:
        if mode[0] not in named:
            continue
        try:
            results[mode[0]] = train(ctx, mode, layout, invariant)
        except JobError as error:
            if results or not invariant:
                raise
            ctx.record.note(f"with kernels whose bits do not depend on the batch: {error}")
            invariant = False
            results[mode[0]] = train(ctx, mode, layout, invariant)
        told = results[mode[0]]
        ctx.record.data["results"] = results
        ctx.record.save()
        ctx.job.say(ctx, f"{mode[0]}: start {told['start_s']} s, step {short(told['step_s'][1:])}, rewards {ends(told['reward'])}")
    ctx.record.data["invariant"] = invariant
    compare(ctx, results)
    say_lost(ctx, results)
    samples = ctx.record.data["samples"]
    left = ", ".join(f"GPU {gpu}: {max(samples[f'left_mib_gpu{gpu}'])}" for gpu in range(layout.gpus) if samples.get(f"left_mib_gpu{gpu}"))
    paused = f"pause {short(samples.get('pause_s', []))}, resume {short(samples.get('resume_s', []))}"
    ctx.job.say(ctx, f"{paused}, deep {short(samples.get('deep_pause_s', []))}, MiB left at most {left or '-'}")


def say_lost(ctx: Context, results: dict[str, Any]) -> None:
    """The share of a step that each unpaused mode loses, next to that by which two runs without Sublet differ."""
    paused = {mode[0] for mode in MODES if mode[3]}
    for name, told in results.items():
        share = lost_share(results["alone"], told) if "alone" in results and name != "alone" and name not in paused else None
        if share is not None:
            ctx.record.data["baseline" if name == "alone_again" else "summary"][f"{name}_step_lost_share"] = share
            ctx.job.say(ctx, f"{name}: a step takes {100 * share:+.1f} % of one of 'alone' more")


def ends(values: list[Any]) -> str:
    """First and last of a series."""
    return f"{values[0]!r} to {values[-1]!r}" if values else "-"


def compare(ctx: Context, results: dict[str, Any]) -> None:
    """Checks each mode for the bits of the first run without Sublet, else for rewards as near as a second such run is."""
    first, twin = results.get("alone"), results.get("alone_again")
    if first is None:
        ctx.record.note("no run without Sublet: the results are not compared")
        return
    apart = first_difference(first, twin) if twin else ""
    if twin:
        ctx.job.say(ctx, f"two runs without Sublet: {apart or 'the same bits'}")
        ctx.record.data["alone_differ"] = apart
        ctx.record.data["reward_spread_alone"] = spread(first, twin)
    for name, told in results.items():
        if name in ("alone", "alone_again"):
            continue
        differ = first_difference(first, told)
        if not (differ and apart and twin):
            ctx.record.check(f"{name}: rewards, losses and norms are those of 'alone'", not differ, differ or json.dumps(told["loss"]))
            continue
        far, most = spread(first, told), 2 * spread(first, twin)
        ctx.record.check(f"{name}: rewards within twice the spread of two runs", far <= most, f"{far} of {most}")
        far, most = max(told["apart"]), 2 * max(first["apart"] + twin["apart"])
        ctx.record.check(f"{name}: the engine has the trainer's weights", far <= most, f"{far} of {most}")
