"""A small language model with nothing fetched: weights from a seed, a tokenizer of bytes, prompts made here."""

from __future__ import annotations

import hashlib
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# The same sums in the same order, in every mode.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rl.arguments import POSITIONS, SHAPES

PAD, BEGIN, END = 0, 1, 2
_VOCABULARY = 512
_CHUNK = 4 << 20


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and three special tokens."""
    names = ["<pad>", "<begin>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    raw = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<begin>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=raw, padding_side="left", **special)


def policy(shape: str, dtype: torch.dtype, device: torch.device) -> Qwen2ForCausalLM:
    """The model, made where it is to be and in its type: no copy on the CPU and none of another type. The same weights on
    each device of one kind. What a model keeps in another type by itself, such as angles in float32, stays so."""
    hidden, layers, heads, kv_heads, inner = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=_VOCABULARY, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, intermediate_size=inner, max_position_embeddings=POSITIONS, pad_token_id=PAD,
        bos_token_id=BEGIN, eos_token_id=END, tie_word_embeddings=True, attn_implementation="sdpa", dtype=dtype,
    )  # fmt: skip
    # Of all devices.
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def prompts() -> list[str]:
    """All of one length, so that no batch is padded."""
    return [f"write {number:02d} letters: " for number in range(64)]


def reward(completions: list[str], **_: object) -> list[float]:
    """The share of ASCII letters: a tenth at first, and something that training can raise."""
    return [sum(letter.isascii() and letter.isalpha() for letter in text) / max(1, len(text)) for text in completions]


def nbytes(tensors: Any) -> int:
    """Of all tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def fingerprint(model: torch.nn.Module) -> str:
    """A sum of all bits of the weights in which their places count, made where they are."""
    sums = []
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            whole = parameter.detach().reshape(-1)
            words = whole.view(torch.int16 if whole.element_size() == 2 else torch.int32)
            for part in words.split(_CHUNK):
                places = torch.arange(1, part.numel() + 1, device=part.device, dtype=torch.int64)
                sums.append((part.to(torch.int64) * places).sum())
    return hashlib.sha256(repr(torch.stack(sums).tolist()).encode()).hexdigest()[:32]


def sha256(model: torch.nn.Module) -> str:
    """Of all bytes of the weights."""
    digest = hashlib.sha256()
    for _, parameter in model.named_parameters():
        digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Of what a run depends on."""
    import accelerate
    import transformers
    import trl

    found = {name: module.__version__ for name, module in (("torch", torch), ("transformers", transformers))}
    found.update(trl=trl.__version__, accelerate=accelerate.__version__)
    if torch.cuda.is_available():
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


def gpu(device: torch.device) -> dict[str, Any]:
    """What a worker says of its GPU; contexts are counted from what the driver says is used."""
    if device.type != "cuda":
        return {"device": 0, "name": "CPU", "total_bytes": 0, "context_bytes": 0}
    about = torch.cuda.get_device_properties(device)
    return {"device": device.index, "name": about.name, "total_bytes": about.total_memory, "context_bytes": 0}


def deterministic() -> None:
    """Asks for kernels that give the same bits each time. cuDNN's attention does not, forward either: on an H200 with
    PyTorch 2.11 each run of the same prompt gave other logits."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.benchmark = False
