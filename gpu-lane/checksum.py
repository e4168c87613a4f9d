"""Checksums of tensors on their device."""

from __future__ import annotations

from typing import Any

CHUNK_WORDS = 2 << 20
MASK = (1 << 64) - 1


def signed(value: int) -> int:
    """`value` modulo 2**64 as a signed 64-bit number."""
    value &= MASK
    return value - (1 << 64) if value >> 63 else value


class Checksum:
    """Position-weighted wrapping sums of tensors: any changed word changes the sum, for every weight is odd."""

    def __init__(self, torch: Any, device: Any) -> None:
        self.torch = torch
        self.weights = torch.arange(CHUNK_WORDS, dtype=torch.int64, device=device) * signed(0x9E3779B97F4A7C16) + 1
        self.product = torch.empty_like(self.weights)
        self.total = torch.zeros((), dtype=torch.int64, device=device)

    def of(self, tensor: Any) -> int:
        """The sum over a contiguous tensor of a multiple of 8 bytes."""
        words = tensor.reshape(-1).view(self.torch.int64)
        self.total.zero_()
        for index, at in enumerate(range(0, words.numel(), CHUNK_WORDS)):
            part = words[at : at + CHUNK_WORDS]
            product = self.product[: part.numel()]
            self.torch.mul(part, self.weights[: part.numel()], out=product)
            self.total.add_(product.sum() * signed((index * 0xD1B54A32D192ED02) | 1))
        return int(self.total.item())
