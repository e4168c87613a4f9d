"""Makes a language model of Qwen3's architecture, or of its mixture of experts, with random weights, and a tokenizer: nothing is fetched.

    python3 programs/engine_model.py FOLDER --size 1.7b --seed 1

Each id of the tokenizer has a text of its own, so equal texts are equal ids. `--lora FOLDER` writes an adapter of rank 8 too.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

#: Width, inner width, layers, heads, heads of the KV cache, width of a head.
SHAPES = {
    "tiny": (64, 128, 2, 4, 2, 16),
    "0.6b": (1024, 3072, 28, 16, 8, 128),
    "1.7b": (2048, 6144, 28, 16, 8, 128),
    "4b": (2560, 9728, 36, 32, 8, 128),
    "tiny-moe": (64, 32, 2, 4, 4, 16),
    "moe": (1024, 768, 16, 16, 4, 128),
}
#: Experts, and how many of them each token has; the inner width is that of one.
EXPERTS = {"tiny-moe": (8, 2), "moe": (32, 4)}
#: Enough for many distinct prompts; the output layer stays small.
VOCABULARY = 32_000
#: Wider than at the start of a training, so that attention and tokens depend on all weights.
DEVIATION = 0.03
RANK = 8


def tokenizer() -> Any:
    """Bytes, then words that are made up."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    words = Tokenizer(models.BPE(vocab=letters, merges=[]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.decoder = decoders.ByteLevel()
    words.add_tokens([f"<t{index}>" for index in range(len(letters), VOCABULARY - 2)])
    words.add_special_tokens(["<eos>", "<pad>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", padding_side="left")
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return fast


def settings(size: str) -> dict[str, Any]:
    """What the configuration of the model is given."""
    width, inner, layers, heads, kv_heads, head = SHAPES[size]
    given: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "eos_token_id": VOCABULARY - 2,
        "pad_token_id": VOCABULARY - 1,
        "bos_token_id": None,
    }
    if size in EXPERTS:
        experts, chosen = EXPERTS[size]
        given |= {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": chosen, "norm_topk_prob": True}
    return given


def make(folder: Path, size: str, seed: int) -> int:
    """Writes the model; its number of parameters."""
    import torch
    import transformers

    kind = "Qwen3Moe" if size in EXPERTS else "Qwen3"
    tokenizer().save_pretrained(folder)
    config = getattr(transformers, f"{kind}Config")(**settings(size))
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, DEVIATION)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def make_adapter(folder: Path, base: Path, size: str, seed: int) -> None:
    """Writes an adapter for the projections of queries and values, in the form that peft has."""
    import torch
    from safetensors.torch import save_file

    width, _, layers, heads, kv_heads, head = SHAPES[size]
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(layers):
        for name, rows in (("q_proj", heads * head), ("v_proj", kv_heads * head)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, width, dtype=torch.float32) * DEVIATION
            tensors[f"{place}.lora_B.weight"] = torch.randn(rows, RANK, dtype=torch.float32) * DEVIATION
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--size", choices=SHAPES, default="1.7b")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--lora", type=Path, help="write an adapter into this folder")
    args = parser.parse_args()
    print(f"{make(args.folder, args.size, args.seed)} parameters in {args.folder}")
    if args.lora:
        make_adapter(args.lora, args.folder, args.size, args.seed)


if __name__ == "__main__":
    main()
