"""Calibration layer by layer, and that GPTQ and AWQ use what it finds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantization.calibration import LayerwiseModel, calibration_rows
from quantization.errors import QuantizationError
from quantization.quantize import Settings, quantize_checkpoint
from tests.unit.helpers import CORPUS
from tests.unit.test_quantization_models import (
    KINDS,
    SHORT,
    cache_argument,
    dequantized,
    distance,
    make,
    write_text,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


@pytest.mark.parametrize(
    ("kind", "weights"), [("Llama", "int4"), ("Llama", "fp8"), ("Llama", "nvfp4"), ("Qwen2", "int4"), ("Qwen3", "int4")]
)
def test_data_helps(kind: str, weights: str, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """On the calibration text itself, what a layer makes of its inputs is nearer to the original than by rounding."""
    errors = {}
    for method in ("rtn", "gptq", "awq")[: 3 if weights == "int4" else 2]:
        settings = Settings(weights, 32, method=method, **SHORT)
        out = quantize_checkpoint(models[kind], tmp_path / method, settings, text)
        ids = calibration_rows(text, models[kind], 8, 32)
        hidden = [outputs(models[kind], ids, source) for source in (models[kind], out)]
        errors[method] = distance(hidden[1], hidden[0])
    assert all(error < errors["rtn"] for method, error in errors.items() if method != "rtn"), errors


def outputs(config: Path, ids: torch.Tensor, weights: Path) -> torch.Tensor:
    """Hidden states after all layers by ``LayerwiseModel``."""
    tensors = dequantized(weights)
    model = LayerwiseModel(config, ids, tensors["model.embed_tokens.weight"])
    for index in range(3):
        base = f"model.layers.{index}."
        model.advance(index, {name.removeprefix(base): t for name, t in tensors.items() if name.startswith(base)})
    return model._hidden


@pytest.mark.parametrize("kind", KINDS)
def test_layer_by_layer_equals_the_model(kind: str, models: dict[str, Path], text: Path) -> None:
    ids = calibration_rows(text, models[kind], 8, 32)
    model = transformers.AutoModelForCausalLM.from_pretrained(models[kind], dtype=torch.float32).eval()
    with torch.no_grad():
        cache = transformers.DynamicCache()
        wanted = model.model(ids, use_cache=True, **cache_argument(model, cache)).last_hidden_state
    got = model.model.norm(outputs(models[kind], ids, models[kind])).detach()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_calibration_files(models: dict[str, Path], tmp_path: Path) -> None:
    checkpoint = models["Llama"]
    lines = tmp_path / "lines.jsonl"
    for content, message in (("{", "line 1"), ('{"prompt": "x"}', "line 1"), ('\n{"text": 3}', "line 2.*string")):
        lines.write_text(content)
        with pytest.raises(QuantizationError, match=message):
            calibration_rows(lines, checkpoint, 4, 8)
    lines.write_text('{"text": "short"}')
    with pytest.raises(QuantizationError, match="at least 64"):
        calibration_rows(lines, checkpoint, 4, 64)
    with pytest.raises(QuantizationError, match="calibration file"):
        calibration_rows(tmp_path / "none.txt", checkpoint, 4, 64)
    plain = tmp_path / "plain.txt"
    plain.write_text(" ".join(CORPUS) * 40)
    assert calibration_rows(plain, checkpoint, 4, 16).shape == (4, 16)
    with pytest.raises(QuantizationError, match="model_type"):
        LayerwiseModel(make_other(tmp_path / "other"), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(4, 8))


@pytest.mark.filterwarnings("ignore")
def test_activations_that_overflow_are_named(text: Path, tmp_path: Path) -> None:
    source = make(tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(3e38)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(QuantizationError, match=r"inputs of .* in layer 1"):
        quantize_checkpoint(source, tmp_path / "out", Settings("int4", 32, method="gptq", **SHORT), text)


def make_other(directory: Path) -> Path:
    transformers.GPT2Config().save_pretrained(directory)
    return directory
