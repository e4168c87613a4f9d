"""GRPO with a trainer and a generator by turns on one GPU: what a conductor has to call, to be copied.

    python examples/grpo.py                       # on a GPU; no PyTorch needed
    sublet simulate -- python examples/grpo.py    # on a simulated one; in the repository, `cargo demo` does so

Both are tenants of one family, processes that know nothing of turns. In each step the conductor, which is `main`, makes
five calls of Sublet. With TRL, verl or a trainer of your own, `learn` is its step and `generate` is the engine's; the calls
stay as they are. The policy here has 26 numbers, at the head of memory that stands for weights: a letter each, and what is
rewarded is the letter e.

The simulated GPU has 512 MiB, and both tenants together want 576. You see the reward grow and what each switch took. At the
end the policy must be, bit for bit, the one that the same steps come to without a GPU.
"""

import json
import math
import random
import statistics
import sys
import time
from array import array

import stage
from device import Memory

WEIGHTS, OPTIMIZER, CACHE = 32 * stage.MIB, 160 * stage.MIB, 352 * stage.MIB
STEPS, COMPLETIONS, LENGTH = 8, 16, 48
LETTERS = "abcdefghijklmnopqrstuvwxyz"
RATE, MOMENTUM = 14.0, 0.6


def generate(logits: list[float], seed: int) -> list[str]:
    """Completions of one prompt."""
    drawn, weights = random.Random(seed), [math.exp(logit) for logit in logits]
    return ["".join(drawn.choices(LETTERS, weights, k=LENGTH)) for _ in range(COMPLETIONS)]


def learn(logits: list[float], momentum: list[float], texts: list[str]) -> tuple[list[float], list[float], float]:
    """One step of GRPO: new logits, new momentum, mean reward."""
    rewards = [text.count("e") / LENGTH for text in texts]
    mean, spread = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-4
    total = sum(math.exp(logit) for logit in logits)
    for index, letter in enumerate(LETTERS):
        chance = math.exp(logits[index]) / total
        pulls = [(reward - mean) / spread * (text.count(letter) / LENGTH - chance) for reward, text in zip(rewards, texts)]
        momentum[index] = MOMENTUM * momentum[index] + statistics.fmean(pulls)
    return [logit + RATE * each for logit, each in zip(logits, momentum)], momentum, mean


def load(memory: Memory) -> list[float]:
    return array("d", memory.read(8 * len(LETTERS))).tolist()


def store(memory: Memory, numbers: list[float]) -> None:
    memory.write(array("d", numbers).tobytes())


def trainer() -> None:
    """A process of tenant `train`, told what to do line by line."""
    device = stage.device()
    weights, optimizer = device.allocate(WEIGHTS), device.allocate(OPTIMIZER)
    store(weights, [0.0] * len(LETTERS))
    store(optimizer, [0.0] * len(LETTERS))
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "lend":
            print(weights.handle(), flush=True)
        elif word == "learn":
            logits, momentum, reward = learn(load(weights), load(optimizer), json.loads(rest))
            store(weights, logits)
            store(optimizer, momentum)
            print(reward, flush=True)
        elif word == "show":
            print(json.dumps(load(weights)), flush=True)


def generator() -> None:
    """A process of tenant `infer`. Nothing of it needs to be saved: new weights come in each step, and the cache is scratch."""
    import sublet

    device = stage.device()
    # It waits for a line while a tag is away, so it runs without.
    with sublet.region("weights", contents="discard", runs_without=True):
        weights = device.allocate(WEIGHTS)
    with sublet.region("kv", contents="discard", runs_without=True):
        cache = device.allocate(CACHE)
    print("ready", flush=True)
    for line in sys.stdin:
        word, _, rest = line.strip().partition(" ")
        if word == "copy":
            lent = device.open(rest, WEIGHTS)
            weights.copy(lent, WEIGHTS)
            lent.free()
            print("copied", flush=True)
        elif word == "generate":
            texts = generate(load(weights), int(rest))
            cache.write("".join(texts).encode())
            print(json.dumps(texts), flush=True)


def main() -> None:
    """The conductor."""
    stage.begin(None)
    import sublet

    train, infer = sublet.Tenant("train"), sublet.Tenant("infer")
    # Tenants of one family may open each other's memory, by which the weights are handed over.
    training = stage.child("train", "--role", "trainer", options=("--family", "rl"))
    stage.ask(training)
    train.pause()
    generating = stage.child("infer", "--role", "generator", options=("--family", "rl"))
    stage.ask(generating)
    infer.pause(tags="kv")
    infer.swap_to(train)
    for step in range(STEPS):
        # The weights alone: what was paused by tag stays away until its tag is resumed.
        infer.resume()
        stage.ask(generating, f"copy {stage.ask(training, 'lend')}")
        began = time.monotonic()
        train.pause()
        infer.resume(tags="kv")
        there = time.monotonic()
        texts = stage.ask(generating, f"generate {step}")
        back = time.monotonic()
        infer.pause(tags="kv")
        infer.swap_to(train)
        took_ms = 1000 * (there - began), 1000 * (time.monotonic() - back)
        reward = float(stage.ask(training, f"learn {texts}"))
        print(f"step {step + 1}: reward {reward:.3f}; to the generator in {took_ms[0]:.0f} ms, and back in {took_ms[1]:.0f} ms")
    found = json.loads(stage.ask(training, "show"))
    logits, momentum = [0.0] * len(LETTERS), [0.0] * len(LETTERS)
    for step in range(STEPS):
        logits, momentum, _ = learn(logits, momentum, generate(logits, step))
    print("the policy is the one that is learned without turns" if found == logits else "the policy is ANOTHER than without turns")
    stage.end(training)
    infer.resume()
    stage.end(generating)
    sys.exit(0 if found == logits else 1)


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        sys.exit(0)
    {"trainer": trainer, "generator": generator}.get(sys.argv[-1], main)()
