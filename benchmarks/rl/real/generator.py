"""The generator: its own copy of the weights, a KV cache, a captured graph, and prompts from the conductor."""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
from typing import Any, Optional

from rl.links import Worker
from rl.real import model as models  # sets variables that PyTorch reads when it is imported
from rl.real.decoding import Decoder, bytes_per_token
from rl.real.weights import Borrower, Layout

import torch  # isort: skip


class Generator:
    """One process of the generator."""

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        models.deterministic()
        self._args = args
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        # It is this tenant's turn to take memory when this returns.
        self._worker = Worker("infer", rank)
        self._device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
        if args.device == "cuda":
            torch.cuda.set_device(self._device)
        self._prompt = len(models.tokenizer()(models.prompts()[0])["input_ids"])
        self._decoder: Optional[Decoder] = None
        self._memory: Optional[torch.Tensor] = None
        self._shapes: list[torch.Size] = []
        self._model = models.policy(args.shape, dtype, self._device).eval()
        if args.tags:
            self._move_weights()
        self._layout = Layout(self._model)
        self._borrower = Borrower(self._layout)
        each = bytes_per_token(self._model.config, dtype)
        self._kv_bytes = max(int(args.kv_gib * (1 << 30)), each * args.generations * (self._prompt + args.tokens))
        self._graph_bytes = 0
        self._arrive(["graphs", "kv"])
        gpu, versions = models.gpu(self._device), models.versions()
        self._worker.hello(gpu=gpu, parts=self._parts(), versions=versions, kv_bytes_per_token=each)

    def run(self) -> None:
        """Serves until it is told to end."""
        operations: dict[str, Any] = {
            "borrow": self._borrower.borrow, "load": self._borrower.load, "generate": self._generate, "leave": self._leave,
            "arrive": self._arrive,
        }  # fmt: skip
        self._worker.serve(operations, until="exit")

    def _region(self, tag: str, contents: Any) -> contextlib.AbstractContextManager[Any]:
        if not self._args.tags:
            return contextlib.nullcontext()
        import sublet

        # The orchestrator pauses a tag only between two requests.
        return sublet.region(tag, contents=contents, runs_without=True)

    def _move_weights(self) -> None:
        """Weights come again with each hand-over, so nobody need save them; what else the model has does not, and stays outside
        of the region."""
        with self._region("weights", "discard"):
            for parameter in self._model.parameters():
                parameter.data = parameter.data.clone()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _parts(self) -> dict[str, int]:
        return {"weights": models.nbytes(self._layout.parameters), "kv": self._kv_bytes, "graphs": self._graph_bytes}

    def _generate(self, ids: list[list[int]], tokens: int, seed: int) -> dict[str, Any]:
        assert self._decoder is not None
        found = self._decoder.generate(ids, seed)
        return {"completions": found, "fingerprint": models.fingerprint(self._model), "tokens": sum(map(len, found))}

    def _leave(self, parts: list[str]) -> int:
        """By hand. Weights come again with each hand-over, and a graph is captured again."""
        if "kv" in parts or "graphs" in parts:
            self._decoder = self._memory = None
        if "weights" in parts:
            self._shapes = [parameter.shape for parameter in self._layout.parameters]
            for parameter in self._layout.parameters:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        return 0

    def _arrive(self, parts: list[str]) -> None:
        if "weights" in parts and self._shapes:
            for parameter, shape in zip(self._layout.parameters, self._shapes):
                parameter.data = torch.zeros(shape, dtype=parameter.dtype, device=self._device)
        if "kv" in parts:
            with self._region("kv", "discard"):
                self._memory = torch.empty(self._kv_bytes, dtype=torch.uint8, device=self._device)
            before = torch.cuda.memory_reserved() if self._device.type == "cuda" else 0
            self._decoder = Decoder(self._model, self._args.generations, self._prompt, self._args.tokens, self._memory)
            if self._device.type == "cuda":
                self._graph_bytes = torch.cuda.memory_reserved() - before


def main() -> None:
    """A process of the generator, as the conductor starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--generations", type=int, required=True)
    parser.add_argument("--kv-gib", type=float, required=True)
    parser.add_argument("--tags", action="store_true", help="memory in regions, to be paused by tag")
    Generator(parser.parse_args(), int(os.environ["RL_GRPO_RANK"])).run()


if __name__ == "__main__":
    main()
