"""TRL's GRPO with vLLM in the trainer's process, which sleeps while the trainer trains. It knows nothing of Sublet.

Says as facts when it is ready and which step is done, and writes the weights' digest, losses, rewards and seconds of steps.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import runner


def reward(completions: list[str], **_given: Any) -> list[float]:
    """More for answers with odd digits."""
    return [sum(letter in "13579" for letter in text) / max(1, len(text)) for text in completions]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--result", type=Path, required=True)
    for name in ("steps", "group", "prompt", "answer"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--share", type=float, required=True, help="of the GPU's memory that vLLM takes")
    parser.add_argument("--life-s", type=float, default=580)
    return parser.parse_args()


def main() -> None:
    args = parse()
    runner.begin(args.life_s)
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    set_seed(0)
    ends: list[float] = []

    class Watcher(TrainerCallback):
        """Notes when each step ended."""

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            torch.cuda.synchronize()
            ends.append(time.perf_counter())
            if state.is_world_process_zero:
                runner.fact("step", int(state.global_step))

    tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
    prompts = [" ".join(f"<t{300 + (row * 7 + at) % 30_000}>" for at in range(args.prompt // 2)) for row in range(64)]
    settings = GRPOConfig(
        output_dir=str(args.result.with_suffix("")),
        per_device_train_batch_size=args.group,
        num_generations=args.group,
        max_completion_length=args.answer,
        max_steps=args.steps,
        learning_rate=1e-5,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        bf16=True,
        gradient_checkpointing=True,
        seed=0,
        beta=0.0,
        disable_tqdm=True,
        temperature=1.0,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=args.share,
        vllm_max_model_length=args.prompt + args.answer + 64,
        optim="adamw_torch_fused",
    )
    trainer = GRPOTrainer(
        model=args.model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        callbacks=[Watcher()],
    )
    is_first = trainer.accelerator.is_main_process
    if is_first:
        runner.fact("ready", True)
    began = time.perf_counter()
    trainer.train()
    if not is_first:
        return
    digest = hashlib.sha256()
    for parameter in trainer.accelerator.unwrap_model(trainer.model).parameters():
        digest.update(parameter.detach().float().cpu().numpy().tobytes())
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    seconds = [end - start for start, end in zip([began, *ends], ends, strict=False)]
    told = {
        "weights": digest.hexdigest(),
        "losses": [entry.get("loss") for entry in log],
        "rewards": [entry["reward"] for entry in log],
        "step_s": seconds,
    }
    args.result.write_text(json.dumps(told))
    runner.row("all steps were made", len(ends) == args.steps, f"{len(ends)} of {args.steps}")


if __name__ == "__main__":
    main()
