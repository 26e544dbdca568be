"""Tiny random checkpoints for the other tests of quantization, and what they compute; no tests of its own."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerFast

from quantization.checkpoints import detect, read_linear
from quantization.files import TensorFiles
from tests.unit.helpers import CORPUS, byte_level_tokenizer

KINDS = ("Llama", "Qwen2", "Qwen3")
SHORT = {"samples": 8, "length": 32}


def make(directory: Path, kind: str = "Llama", dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Path:
    sizes = {"vocab_size": 330, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.1}
    config = getattr(transformers, f"{kind}Config")(**(sizes | heads | changes))
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias")):
            torch.nn.init.normal_(parameter, 1.0 if name.endswith("norm.weight") else 0.0, 0.3)
    model.to(dtype).save_pretrained(directory)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token="<|im_end|>")
    tokenizer.save_pretrained(directory)
    return directory


def dequantized(directory: Path) -> dict[str, torch.Tensor]:
    """All weights of a checkpoint in float32, read by this package."""
    scheme = detect(json.loads((directory / "config.json").read_text()))
    weights: dict[str, torch.Tensor] = {}
    with TensorFiles.of(directory) as files:
        layers = {name.rpartition(".")[0] for name in files.shapes}
        for layer in layers:
            if layer.endswith("_proj"):
                weight = read_linear(layer, files.read, files.shapes, scheme)
                weights[f"{layer}.weight"] = weight.float() if isinstance(weight, torch.Tensor) else weight.dequantize()
                if f"{layer}.bias" in files.shapes:
                    weights[f"{layer}.bias"] = files.read(f"{layer}.bias").float()
        kept = [name for name in files.shapes if not name.rpartition(".")[0].endswith("_proj") and not name.endswith("_scale")]
        return weights | {name: files.read(name).float() for name in kept}


def logits(directory: Path, weights: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
    """Float32 [2, 24, vocabulary] of the checkpoint's own weights, or of others in its place."""
    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(weights if weights is not None else dequantized(directory), strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return run(model)


def run(model: Any) -> torch.Tensor:
    ids = (torch.arange(48).reshape(2, 24) * 7919) % 330
    with torch.no_grad():
        output: torch.Tensor = model(ids).logits.float()
    return output


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


def cache_argument(model: Any, cache: Any) -> dict[str, Any]:
    names = inspect.signature(model.model.forward).parameters
    return {"cache" if "cache" in names else "past_key_values": cache}


def write_text(path: Path) -> Path:
    """A calibration file of some 1,000 tokens."""
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in CORPUS * 8), encoding="utf-8")
    return path
