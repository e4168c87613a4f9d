"""Megatron's core: a GPT whose layers are split over ranks, with sequence parallel exchanges.

    torchrun --standalone --nproc-per-node 2 programs/engine_megatron.py --steps 500
"""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from training import Training

LAYERS, ROWS, LENGTH, WORDS = 4, 4, 128, 1024


def main() -> None:
    training = Training(__doc__)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=training.world)
    model_parallel_cuda_manual_seed(0)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=training.args.width,
        num_attention_heads=8,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        # torch's LayerNorm, which is Megatron's without Transformer Engine, has no sequence parallelism.
        sequence_parallel=False,
        tensor_model_parallel_size=training.world,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=WORDS, max_sequence_length=LENGTH).to(training.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    places = torch.arange(LENGTH, device=training.device).expand(ROWS, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=training.device).triu(1)

    def step(number: int) -> torch.Tensor:
        words = (training.batch(number, 0, ROWS, LENGTH).abs() * 300).long() % WORDS
        loss = model(words, places, mask, labels=words.roll(-1, 1)).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss

    training.run(step, reader=0, model=model)


if __name__ == "__main__":
    main()
