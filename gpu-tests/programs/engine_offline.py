"""Generates with vLLM's `LLM`, greedily, again and again, as a script of its user would. It knows nothing of Sublet.

One request at a time, so that its batch is always the same and its log-probabilities can be compared bit for bit. The
first answer meets an empty prefix cache, later ones a warm one: each is compared with its like. Says as facts what
came out; `--stop` is a file that ends the generating, `--cycles` are rounds of vLLM's own sleep, levels 1 and 2.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import runner

#: Words of the prompt. With ngram decoding half of it is said twice, so that there is something to propose.
PROMPT = 64


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--variant", choices=("plain", "uncached", "lora", "ngram", "experts"), default="plain")
    parser.add_argument("--adapter", default="")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.3, help="of the GPU's memory that vLLM takes")
    parser.add_argument("--tokens", type=int, default=600)
    parser.add_argument("--cycles", type=int, default=0)
    parser.add_argument("--stop", type=Path)
    parser.add_argument("--answers", type=Path, required=True, help="file for the first two answers")
    parser.add_argument("--life-s", type=float, default=580)
    return parser.parse_args()


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What `LLM` is given; all else stays as vLLM has it."""
    given: dict[str, Any] = {
        "gpu_memory_utilization": args.share,
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "tensor_parallel_size": args.tp,
        "seed": 0,
    }
    if args.variant == "uncached":
        given["enable_prefix_caching"] = False
    if args.variant == "experts":
        given["enable_expert_parallel"] = True
    if args.variant == "lora":
        given |= {"enable_lora": True, "max_lora_rank": 8}
    if args.variant == "ngram":
        given["speculative_config"] = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    if args.cycles:
        given["enable_sleep_mode"] = True
    return given


def generator(llm: Any, args: argparse.Namespace) -> Callable[[], dict[str, Any]]:
    """A function that generates once, and gives tokens and log-probabilities in hexadecimal."""
    from vllm import SamplingParams

    rng = random.Random(5)
    prompt = [rng.randrange(300, 31_000) for _ in range(PROMPT)]
    if args.variant == "ngram":
        prompt = prompt[: PROMPT // 2] * 2
    sampling = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True, logprobs=1, detokenize=False)
    more: dict[str, Any] = {}
    if args.variant == "lora":
        from vllm.lora.request import LoRARequest

        more["lora_request"] = LoRARequest("adapter", 1, args.adapter)

    def once() -> dict[str, Any]:
        found = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False, **more)[0].outputs[0]
        tokens = list(found.token_ids)
        chances = [float(place[token].logprob).hex() for place, token in zip(found.logprobs, tokens, strict=True)]
        return {"tokens": tokens, "logprobs": chances}

    return once


def used() -> int:
    """The most MiB in use on a GPU that this process sees, or on any."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    found = common.used_mib()
    return max([found[int(index)] for index in seen.split(",") if index.isdigit()] or found)


def sleeps(llm: Any, cycles: int, once: Callable[[], dict[str, Any]], warm: dict[str, Any]) -> None:
    """Both levels, `cycles` times each; samples of the seconds and of what is left on the GPU."""
    wrong = 0
    for _ in range(cycles):
        for level in (1, 2):
            began = time.perf_counter()
            llm.sleep(level=level)
            runner.sample(f"sleep{level}_s", time.perf_counter() - began)
            runner.sample(f"sleep{level}_left_mib", used())
            began = time.perf_counter()
            if level == 1:
                llm.wake_up()
                runner.sample("wake1_s", time.perf_counter() - began)
            else:
                llm.wake_up(tags=["weights"])
                woken = time.perf_counter() - began
                began = time.perf_counter()
                llm.collective_rpc("reload_weights")
                runner.sample("reload2_s", time.perf_counter() - began)
                began = time.perf_counter()
                llm.wake_up(tags=["kv_cache"])
                runner.sample("wake2_s", woken + time.perf_counter() - began)
            # The cache is empty now, so the second answer is the one with a like.
            once()
            wrong += once() != warm
    runner.row("answers after sleeps are the same bits", wrong == 0, f"{wrong} of {2 * cycles} differ")


def main() -> None:
    args = parse()
    runner.begin(args.life_s)
    began = time.perf_counter()
    from vllm import LLM

    llm = LLM(args.model, **settings(args))
    runner.fact("start_s", time.perf_counter() - began)
    once = generator(llm, args)
    cold, warm = once(), once()
    args.answers.write_text(json.dumps([cold, warm]))
    runner.fact("distinct_tokens", len(set(cold["tokens"])))
    runner.fact("mib", used())
    # Some kernels, such as those of adapters, add in another order each time: such answers cannot be compared.
    runner.fact("steady", once() == warm)
    runner.fact("ready", True)
    times, wrong = [], 0
    while args.stop and not args.stop.exists():
        began = time.perf_counter()
        wrong += once() != warm
        times.append(time.perf_counter() - began)
    if args.stop:
        runner.fact("answers", {"count": len(times), "differ": wrong, "seconds": times})
    if args.cycles:
        sleeps(llm, args.cycles, once, warm)
    runner.fact("done", True)


if __name__ == "__main__":
    main()
