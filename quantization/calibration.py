"""What the inputs of a decoder's linear layers look like on real text, one layer in memory at a time."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantization.errors import bad

MODEL_TYPES = ("llama", "qwen2", "qwen3")
# Linear layers that read the same input, and the module whose output channels it consists of.
INPUTS = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    (("self_attn.o_proj",), "self_attn.v_proj"),
    (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    (("mlp.down_proj",), "mlp.up_proj"),
)
_STEP_TOKENS = 2048


@dataclass
class InputStatistics:
    """Means over all calibration tokens of an input x [K]: ``gram`` of x times its transpose, float32 [K, K], and
    ``magnitude`` of |x|, float32 [K]."""

    gram: Tensor
    magnitude: Tensor


def calibration_rows(path: Path, checkpoint: Path, samples: int, length: int) -> Tensor:
    """Token ids int64 [rows, length], at most ``samples`` rows, spread evenly over the file.

    ``path`` is a text file, or JSON lines with a ``text`` or with ``messages`` for the chat template. The tokenizer is
    the checkpoint's; documents are joined, each with an end-of-sequence token after it.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint), local_files_only=True)
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ids: list[int] = []
    for document in _documents(path, tokenizer):
        ids += tokenizer(document)["input_ids"] + end
    count = len(ids) // length
    if count == 0:
        raise bad(f"tokens of calibration file {path}", len(ids), f"at least {length}")
    rows = torch.tensor(ids[: count * length]).reshape(count, length)
    chosen = torch.linspace(0, count - 1, min(samples, count)).round().long()
    return rows[chosen]


class LayerwiseModel:
    """Runs a Llama, Qwen2 or Qwen3 decoder in float32 with the modules of transformers, one layer at a time.

    Holds the hidden states of all calibration tokens, float32 [rows, length, hidden], and no weights between two calls.
    """

    def __init__(self, checkpoint: Path, ids: Tensor, embedding: Tensor) -> None:
        """``ids`` int64 [rows, length]; ``embedding`` [vocabulary, hidden]."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config: Any = AutoConfig.from_pretrained(str(checkpoint), local_files_only=True)
        check_model(config)
        config._attn_implementation = "sdpa"
        with torch.device("meta"):
            models: Any = AutoModelForCausalLM
            skeleton = models.from_config(config).model
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        self._layers = skeleton.layers
        if int(ids.max()) >= embedding.shape[0]:
            raise bad("token id of the tokenizer", int(ids.max()), f"ids below the embedding's {embedding.shape[0]} rows")
        self._hidden = embedding[ids].to(torch.float32)
        self._positions = torch.arange(ids.shape[1])[None]
        rotary = type(skeleton.rotary_emb)(config)
        self._rotary = rotary(self._hidden[:1], self._positions)
        self._batch = max(1, _STEP_TOKENS // ids.shape[1])

    def statistics(self, index: int, tensors: Mapping[str, Tensor]) -> dict[str, InputStatistics]:
        """Of layer ``index`` with ``tensors`` (names inside the layer), by the first reader in ``INPUTS`` of each input."""
        found: dict[str, InputStatistics] = {}
        layer = self._layer(index, tensors)
        hooks = []
        for readers, _ in INPUTS:
            module = layer.get_submodule(readers[0])
            width = module.in_features
            found[readers[0]] = InputStatistics(torch.zeros(width, width), torch.zeros(width))
            hooks.append(module.register_forward_pre_hook(_accumulate(found[readers[0]])))
        self._run(layer, None, keep=False)
        for hook in hooks:
            hook.remove()
        tokens = self._hidden.shape[0] * self._hidden.shape[1]
        for statistics in found.values():
            statistics.gram /= tokens
            statistics.magnitude /= tokens
        for name, statistics in found.items():
            if not bool(statistics.gram.isfinite().all()):
                raise bad(f"inputs of {name} in layer {index}", "NaN or infinity", "finite values on the calibration text")
        return found

    def advance(self, index: int, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Replaces the hidden states by the outputs of layer ``index``.

        Gives the largest magnitudes of its keys (with rotary embedding) and values: two float32 [kv heads].
        """
        ranges = _Ranges()
        self._run(self._layer(index, tensors), ranges, keep=True)
        assert ranges.keys is not None and ranges.values is not None
        return ranges.keys, ranges.values

    def _layer(self, index: int, tensors: Mapping[str, Tensor]) -> Any:
        layer = self._layers[index]
        state = {name: tensor.to(torch.float32) for name, tensor in tensors.items()}
        missing, unexpected = layer.load_state_dict(state, strict=False, assign=True)
        if missing or [name for name in unexpected if not name.endswith("rotary_emb.inv_freq")]:
            raise bad(f"tensors of layer {index}", missing + unexpected, "those that config.json implies")
        return layer.eval()

    @torch.inference_mode()
    def _run(self, layer: Any, ranges: _Ranges | None, keep: bool) -> None:
        # transformers renamed the argument within version 5.
        cache = "cache" if "cache" in inspect.signature(layer.forward).parameters else "past_key_values"
        for start in range(0, self._hidden.shape[0], self._batch):
            part = self._hidden[start : start + self._batch]
            output = layer(
                part,
                attention_mask=None,
                position_ids=self._positions,
                position_embeddings=self._rotary,
                **({} if ranges is None else {cache: ranges}),
            )
            if keep:
                self._hidden[start : start + self._batch] = output[0] if isinstance(output, tuple) else output
        layer.to("meta")


def check_model(config: Any) -> None:
    """Refuses, by field and value, a transformers configuration that ``LayerwiseModel`` cannot run."""
    check_model_type(config.model_type)
    if set(getattr(config, "layer_types", None) or ["full_attention"]) != {"full_attention"}:
        raise bad("layer_types for calibration", config.layer_types, "full_attention in every layer")


def check_model_type(model_type: Any) -> None:
    if model_type not in MODEL_TYPES:
        raise bad("model_type for calibration", model_type, ", ".join(MODEL_TYPES))


class _Ranges:
    """Stands in for the cache of the attention: notes the largest magnitudes a head."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, tokens, head_dim]."""
        largest = [part.abs().amax((0, 2, 3)) for part in (keys, values)]
        self.keys = largest[0] if self.keys is None else torch.maximum(self.keys, largest[0])
        self.values = largest[1] if self.values is None else torch.maximum(self.values, largest[1])
        return keys, values


def _accumulate(statistics: InputStatistics) -> Any:
    def hook(module: Any, arguments: tuple[Tensor, ...]) -> None:
        rows = arguments[0].reshape(-1, arguments[0].shape[-1])
        statistics.gram.addmm_(rows.t(), rows)
        statistics.magnitude += rows.abs().sum(0)

    return hook


def _documents(path: Path, tokenizer: Any) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise bad("calibration file", str(path), f"readable text or JSON lines ({error})") from error
    if path.suffix != ".jsonl":
        return [text]
    documents = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            document = entry["text"] if "text" in entry else tokenizer.apply_chat_template(entry["messages"], tokenize=False)
        except (ValueError, KeyError, TypeError) as error:
            raise bad(f"{path} line {number}", line, 'an object with "text" or "messages"') from error
        if not isinstance(document, str):
            raise bad(f"{path} line {number}: text", document, "a string")
        documents.append(document)
    return documents
