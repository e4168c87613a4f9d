"""Trains a model whose optimizer's state is in host memory, with a part of it on the GPU by turns.

    sublet run --tenant train -- python3 examples/train_larger_than_memory.py

needs one GPU and PyTorch. With Adam in fp32, 8 of 16 bytes a parameter are the optimizer's state: 6 GB of the default
model's 12. Here at most `--frames` of these are on the GPU. The losses are those of the plain optimizer, bit for bit:
compare with `--plain`. Meanwhile the tenant can be paused and resumed, as any other.

The default model is small against the link: on one H200 a step takes 1.36 of the plain one (0.156 s). With more tokens a step the
copies hide behind backward (docs/larger-than-memory.md).

It prints the loss of each step, the most device memory that was in use, and what went over the link.
"""

from __future__ import annotations

import argparse
import os
import time

# The same bits in each run.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import sublet


class Layer(nn.Module):
    """Attention, then a small network, as a transformer has them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        parts = self.qkv(self.norm_1(hidden)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return hidden + self.down(functional.gelu(self.up(self.norm_2(hidden))))


class Model(nn.Module):
    """Predicts the next of `words` tokens."""

    def __init__(self, words: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss."""
        hidden = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            # Only inputs of layers are kept for backward.
            hidden = checkpoint(layer, hidden, use_reentrant=False)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", default="1GiB", help="device memory for the optimizer's state")
    parser.add_argument("--step", choices=["backward", "after"], default="backward", help="when the optimizer steps")
    parser.add_argument("--plain", action="store_true", help="all state on the GPU, for comparison")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=14)
    parser.add_argument("--tokens", type=int, default=1024, help="of each of 8 sequences")
    args = parser.parse_args()

    torch.manual_seed(1)
    # Flash attention has a backward pass that is the same each time; the others have not.
    for other in (torch.backends.cuda.enable_mem_efficient_sdp, torch.backends.cuda.enable_cudnn_sdp):
        other(False)
    torch.backends.cuda.enable_math_sdp(False)
    torch.use_deterministic_algorithms(True)
    with torch.device("cuda"):
        model = Model(words=16_000, width=args.width, layers=args.layers, heads=args.width // 128)
        data = [torch.randint(0, 16_000, (8, args.tokens + 1)) for _ in range(4)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if not args.plain:
        # The one line.
        optimizer = sublet.paged(optimizer, frames=args.frames, step=args.step)

    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")
    for step in range(args.steps):
        began = time.monotonic()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(data[step % len(data)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step} loss {loss.item().hex()} took {time.monotonic() - began:.3f} s", flush=True)

    free, total = torch.cuda.mem_get_info()
    print(f"{(total - free) / 1e9:.1f} GB of device memory in use")
    for told in sublet.report():
        sizes = {name: told[f"{name}_bytes"] / 1e9 for name in ("paged", "resident", "out", "in")}
        print("GB of state: {paged:.1f}, on the GPU {resident:.1f}; copied out {out:.1f}, in {in:.1f}".format(**sizes))


if __name__ == "__main__":
    main()
