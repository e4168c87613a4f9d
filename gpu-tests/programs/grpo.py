"""TRL's GRPO: a small language model writes answers, is rewarded for them, and learns. On the first GPU alone.

    python3 programs/grpo.py --steps 60

Model and tokenizer are made here, from a seed: nothing is fetched. A step's value is the sum of the weights.
"""

from __future__ import annotations

import hashlib
import os

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]

import torch
from datasets import Dataset
from steps import Steps
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

WORDS, PROMPT_WORDS, ANSWER_TOKENS, ANSWERS = 200, 8, 16, 8
#: Steps that `--seconds` times first, and how many of them are not counted: each is a generation.
TIMED = (12, 6)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    names = ["<pad>", "<end>", "<other>", *(f"w{index}" for index in range(WORDS))]
    words = Tokenizer(models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="<other>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<other>", padding_side="left"
    )


def reward(completions: list[str], **_given: object) -> list[float]:
    """More for answers of even words."""
    return [sum(1.0 for word in text.split() if word[1:].isdigit() and int(word[1:]) % 2 == 0) for text in completions]


class Watcher(TrainerCallback):
    """Tells each step, and ends the training after the last."""

    def __init__(self, steps: Steps, model: torch.nn.Module) -> None:
        self.steps, self.model = steps, model

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: object
    ) -> TrainerControl:
        total = sum(parameter.detach().double().sum() for parameter in self.model.parameters())
        control.should_training_stop = not self.steps.note(float(total).hex())
        return control


def main() -> None:
    steps = Steps(__doc__, TIMED)
    set_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=min(steps.args.width, 512),
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=128,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        bos_token_id=words.eos_token_id,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    prompts = [" ".join(f"w{(31 * row + 7 * at) % WORDS}" for at in range(PROMPT_WORDS)) for row in range(64)]
    settings = GRPOConfig(
        output_dir=str(steps.args.out / "trainer"),
        per_device_train_batch_size=ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=ANSWER_TOKENS,
        max_steps=100_000,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
        bf16=False,
        gradient_checkpointing=False,
        use_vllm=False,
        save_strategy="no",
        logging_steps=100_000,
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        processing_class=words,
        callbacks=[Watcher(steps, model)],
    )
    trainer.train()
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    steps.write(f"weights {digest.hexdigest()}")


if __name__ == "__main__":
    main()
