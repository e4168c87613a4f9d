"""What stands in for vLLM in rehearsals: holds memory of each GPU that it may see, and always answers the same."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

from driver import Driver

HELD_BYTES = 4 << 20


def hold(gpus: int) -> list[Any]:
    """Memory on the first so many GPUs."""
    devices = Driver()
    held = []
    for gpu in range(gpus):
        devices.use(gpu)
        held.append(devices.alloc(HELD_BYTES))
    return [devices, *held]


class SamplingParams:
    def __init__(self, max_tokens: int, **_given: Any) -> None:
        self.max_tokens = max_tokens


class LLM:
    """An engine whose tokens are those of the prompt."""

    def __init__(self, model: str, tensor_parallel_size: int, **given: Any) -> None:
        self.held = hold(tensor_parallel_size)
        print(f"engine of {model} on {tensor_parallel_size} GPUs, expert parallel: {given.get('enable_expert_parallel', False)}", flush=True)

    def generate(self, prompts: list[dict[str, Any]], sampling: SamplingParams, **_given: Any) -> list[Any]:
        time.sleep(0.02)
        prompt = prompts[0]["prompt_token_ids"]
        tokens = [prompt[index % len(prompt)] for index in range(sampling.max_tokens)]
        chances = [{token: SimpleNamespace(logprob=-1.0 / (1 + token))} for token in tokens]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=chances)])]


def visible() -> int:
    """How many GPUs this process may see."""
    return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
