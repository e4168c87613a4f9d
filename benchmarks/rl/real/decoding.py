"""Generation with a static cache: on a GPU each token is one replay of a captured CUDA graph."""

from __future__ import annotations

from typing import Any, Optional

import torch
from transformers import StaticCache

from rl.real.model import END


class Slots(StaticCache):
    """A static cache in memory that is given: keys and values of `length` places of each of `batch` sequences. Where the
    next ones go says `place`, a tensor, so that a captured graph can be replayed for every token."""

    def __init__(self, config: Any, batch: int, length: int, memory: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(config=config, max_cache_len=length)
        heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        shape = (config.num_hidden_layers, 2, batch, heads, length, width)
        count = 1
        for extent in shape:
            count *= extent
        self.slots = memory[: count * dtype.itemsize].view(dtype).view(shape)
        self.place = torch.zeros(1, dtype=torch.long, device=memory.device)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *_: Any, **__: Any) -> tuple[Any, Any]:
        """Keeps keys and values at `place`, and gives all of the layer."""
        keys, values = self.slots[layer_idx, 0], self.slots[layer_idx, 1]
        keys.index_copy_(2, self.place, key_states)
        values.index_copy_(2, self.place, value_states)
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Not used: positions are always given."""
        return 0


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Of the cache, for one token of one sequence."""
    width = config.hidden_size // config.num_attention_heads
    return int(2 * config.num_hidden_layers * config.num_key_value_heads * width * dtype.itemsize)


class Decoder:
    """Generates for batches of one size and length."""

    def __init__(self, model: Any, batch: int, prompt: int, tokens: int, memory: torch.Tensor) -> None:
        self._model, self._batch, self._prompt, self._tokens = model, batch, prompt, tokens
        device, dtype = memory.device, next(model.parameters()).dtype
        self._length = prompt + tokens
        self._cache = Slots(model.config, batch, self._length, memory, dtype)
        self._ids = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._position = torch.zeros(batch, 1, dtype=torch.long, device=device)
        self._mask = torch.zeros(batch, 1, 1, self._length, dtype=torch.bool, device=device)
        self._place = torch.zeros(1, dtype=torch.long, device=device)
        self._graph: Optional[Any] = None
        self._logits: Any = None
        if device.type == "cuda":
            self._capture()

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        self._cache.place = place
        out = self._model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        return out.logits[:, -1].float()

    def _step(self) -> torch.Tensor:
        return self._forward(self._ids, self._position, self._mask, self._place)

    @torch.no_grad()
    def _capture(self) -> None:
        self._cache.slots.zero_()
        self._mask.fill_(True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._step()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._step()

    @torch.no_grad()
    def generate(self, ids: list[list[int]], seed: int) -> list[list[int]]:
        """New tokens of each sequence, up to its end token."""
        device = self._cache.slots.device
        drawn = torch.Generator(device=device)
        drawn.manual_seed(seed)
        # A pause may have discarded what was there: a masked place counts nothing, unless it holds no number.
        self._cache.slots.zero_()
        self._mask.fill_(False)
        self._mask[..., : self._prompt] = True
        places = torch.arange(self._prompt, device=device)
        causal = (torch.arange(self._length, device=device) <= places[:, None]).expand(self._batch, 1, -1, -1)
        positions = places.expand(self._batch, -1)
        logits = self._forward(torch.tensor(ids, device=device), positions, causal, places)
        found = torch.empty(self._batch, self._tokens, dtype=torch.long, device=device)
        for number in range(self._tokens):
            token = torch.multinomial(torch.softmax(logits, dim=-1), 1, generator=drawn)
            found[:, number : number + 1] = token
            if number + 1 == self._tokens:
                break
            at = self._prompt + number
            self._ids.copy_(token)
            self._position.fill_(at)
            self._place.fill_(at)
            self._mask[..., at] = True
            logits = self._replay()
        return [one[: one.index(END) + 1] if END in one else one for one in found.tolist()]

    def _replay(self) -> torch.Tensor:
        if self._graph is None:
            return self._step()
        self._graph.replay()
        return self._logits
