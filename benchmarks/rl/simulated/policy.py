"""A language model of 27 numbers, and GRPO on it, in Python alone.

The numbers are the logits of 27 letters. They lie at the head of the memory that stands for weights; behind them lies a
pattern that is drawn from them and a counter, so that every byte of both tenants' weights and of the optimizer's memory
can be checked, and what is computed from them is wrong when one byte is.
"""

from __future__ import annotations

import hashlib
import math
import random
import struct

LETTERS = "abcdefghijklmnopqrstuvwxyz "
HEAD_BYTES = 4096
_BLOCK_BYTES = 65536
_LEARNING_RATE, _MOMENTUM = 14.0, 0.6


def packed(numbers: list[float], step: int, size_bytes: int) -> bytes:
    """`numbers`, then the pattern that belongs to them and to `step`."""
    head = struct.pack(f"<q{len(numbers)}d", step, *numbers).ljust(HEAD_BYTES, b"\0")
    seed = hashlib.blake2b(head).digest()
    count = (size_bytes - HEAD_BYTES + _BLOCK_BYTES - 1) // _BLOCK_BYTES
    repeats = _BLOCK_BYTES // 64
    blocks = (hashlib.blake2b(seed + struct.pack("<q", counter)).digest() * repeats for counter in range(count))
    return (head + b"".join(blocks))[:size_bytes]


def unpacked(data: bytes) -> tuple[int, list[float]]:
    """Step and numbers of what `packed` made; ValueError where a byte is another."""
    step, *numbers = struct.unpack_from(f"<q{len(LETTERS)}d", data)
    if packed(numbers, step, len(data)) != data:
        raise ValueError(f"the memory of step {step} has other bytes than were written")
    return step, numbers


def digest(data: bytes) -> str:
    """A hash of all bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def write_texts(logits: list[float], seed: int, count: int, length: int) -> list[str]:
    """Completions drawn from the policy."""
    weights = [math.exp(logit) for logit in logits]
    drawn = random.Random(seed)
    return ["".join(drawn.choices(LETTERS, weights, k=length)) for _ in range(count)]


def reward(text: str) -> float:
    """The share of the letter e."""
    return text.count("e") / len(text)


def update(logits: list[float], momentum: list[float], groups: list[list[str]]) -> tuple[list[float], list[float], float, float]:
    """One step of GRPO: new logits, new momentum, loss, mean reward. Each group answers one prompt."""
    total = sum(math.exp(logit) for logit in logits)
    chance = [math.exp(logit) / total for logit in logits]
    gradient = [0.0] * len(logits)
    loss = mean_reward = 0.0
    texts = sum(len(group) for group in groups)
    for group in groups:
        rewards = [reward(text) for text in group]
        mean = sum(rewards) / len(group)
        spread = math.sqrt(sum((each - mean) ** 2 for each in rewards) / len(group)) + 1e-4
        for text, each in zip(group, rewards):
            advantage = (each - mean) / spread
            mean_reward += each / texts
            for index, letter in enumerate(LETTERS):
                share = text.count(letter) / len(text)
                gradient[index] -= advantage * (share - chance[index]) / texts
                loss -= advantage * share * math.log(chance[index]) / texts
    momentum = [_MOMENTUM * old + new for old, new in zip(momentum, gradient)]
    logits = [logit - _LEARNING_RATE * each for logit, each in zip(logits, momentum)]
    return logits, momentum, loss, mean_reward
