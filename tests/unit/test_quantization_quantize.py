"""Whole checkpoints of tiny random models: written, loaded by transformers, resumed after a kill, refused."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantization.calibration import calibration_rows
from quantization.checkpoints import detect, read_kv_scales
from quantization.errors import QuantizationError
from quantization.files import TensorFiles
from quantization.quantize import Settings, quantize_checkpoint
from tests.unit.test_quantization_models import (
    KINDS,
    SHORT,
    cache_argument,
    dequantized,
    distance,
    logits,
    make,
    run,
    write_text,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: make(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text") / "text.jsonl")


CASES = {
    "int4": (Settings("int4", 32), 0.35),
    "int4 asymmetric": (Settings("int4", 32, symmetric=False), 0.3),
    "int4 per channel": (Settings("int4", -1), 0.4),
    "int4 awq": (Settings("int4", 32, method="awq", **SHORT), 0.35),
    "int4 awq asymmetric": (Settings("int4", 32, symmetric=False, method="awq", **SHORT), 0.3),
    "int4 gptq": (Settings("int4", 32, method="gptq", **SHORT), 0.35),
    "int8": (Settings("int8"), 0.03),
    "fp8": (Settings("fp8"), 0.15),
    "fp8 block": (Settings("fp8", block=(32, 32)), 0.15),
    "fp8 gptq": (Settings("fp8", method="gptq", **SHORT), 0.15),
    "nvfp4": (Settings("nvfp4"), 0.5),
    "nvfp4 gptq": (Settings("nvfp4", method="gptq", **SHORT), 0.5),
    "int8 kv": (Settings("int8", kv="fp8", **SHORT), 0.03),
}


@pytest.mark.parametrize(
    ("case", "kind"),
    [(case, "Llama") for case in CASES]
    + [(case, kind) for case in ("int4", "int4 awq asymmetric", "fp8", "int8 kv") for kind in ("Qwen2", "Qwen3")],
)
def test_written_and_loaded(case: str, kind: str, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    """Close to the original by this package's reader, and the same by transformers with compressed-tensors."""
    settings, bound = CASES[case]
    done: list[tuple[int, int, str]] = []
    out = quantize_checkpoint(models[kind], tmp_path / "out", settings, text, lambda *step: done.append(step))
    assert [step[0] for step in done] == list(range(1, done[-1][1] + 1))
    wanted = logits(models[kind])
    ours = logits(out)
    assert distance(ours, wanted) < bound
    assert (out / "tokenizer.json").exists() and not list(out.glob("*.partial"))
    importlib.import_module("compressed_tensors")
    # Scales are bfloat16, and compressed-tensors multiplies in the dtype of the scales (NVFP4: in bfloat16 always).
    dtype = torch.bfloat16 if settings.weights == "nvfp4" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    assert distance(run(model), ours) < 0.02
    dense = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=dtype, quantization_config=dense)
    assert distance(run(model), ours) < 0.02


@pytest.mark.parametrize("sharing", ["tensor", "attn_head"])
def test_kv_scales_are_the_largest_keys_and_values(sharing: str, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    settings = Settings("int8", kv="fp8", kv_sharing=sharing, **SHORT)
    out = quantize_checkpoint(models["Qwen3"], tmp_path / "out", settings, text)
    tensors = dequantized(out)
    config = transformers.AutoConfig.from_pretrained(models["Qwen3"])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    cache = transformers.DynamicCache()
    ids = calibration_rows(text, models["Qwen3"], 8, 32)
    with torch.no_grad():
        model.model(ids, use_cache=True, **cache_argument(model, cache))
    scheme = detect(json.loads((out / "config.json").read_text()))
    with TensorFiles.of(out) as files:
        for index in range(3):
            found = read_kv_scales(f"model.layers.{index}", files.read, files.shapes, scheme, heads=2)
            assert found is not None
            layer = cache.layers[index]
            for scales, states in zip(found, (layer.keys, layer.values), strict=True):
                amax = states.abs().amax((0, 2, 3))
                wanted = (amax.max().expand(2) if sharing == "tensor" else amax) / 448
                torch.testing.assert_close(scales, wanted, rtol=2**-8, atol=0)


@pytest.mark.parametrize("method", ["rtn", "awq", "gptq"])
def test_killed_and_run_again_gives_the_same_bytes(method: str, models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    settings = Settings("int4", 32, method=method, kv="fp8", **SHORT)
    whole = quantize_checkpoint(models["Qwen2"], tmp_path / "whole", settings, text)
    code = f"""
import os, signal, torch
from pathlib import Path
torch.set_num_threads({torch.get_num_threads()})
from quantization.quantize import Settings, quantize_checkpoint
def stop(done, total, name):
    if done == 2: os.kill(os.getpid(), signal.SIGKILL)
quantize_checkpoint({str(models["Qwen2"])!r}, {str(tmp_path / "cut")!r}, {settings!r}, {str(text)!r}, stop)
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -signal.SIGKILL
    cut = tmp_path / "cut"
    assert not (cut / "config.json").exists()
    # As if it had been killed while it wrote, and after a layer's weights but before its scales of keys and values.
    (cut / "model-00003-of-00004.partial").write_bytes(b"half")
    first = sorted(cut.glob("*.safetensors"))[1]
    save_file({k: v for k, v in load_file(first).items() if not k.endswith(("k_scale", "v_scale"))}, first, {"format": "pt"})
    kept = sorted(cut.glob("*.safetensors"))[0].stat().st_mtime_ns
    quantize_checkpoint(models["Qwen2"], cut, settings, text)
    assert sorted(cut.glob("*.safetensors"))[0].stat().st_mtime_ns == kept
    assert {p.name: p.read_bytes() for p in cut.iterdir()} == {p.name: p.read_bytes() for p in whole.iterdir()}
    quantize_checkpoint(models["Qwen2"], cut, settings, text)


def test_tied_embeddings_shards_and_other_files(tmp_path: Path) -> None:
    source = make(tmp_path / "tied", tie_word_embeddings=True)
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for index, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, source / f"part-{index}.safetensors")
        where |= dict.fromkeys(part, f"part-{index}.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (source / "notes.txt").write_text("kept")
    out = quantize_checkpoint(source, tmp_path / "out", Settings("int8"))
    assert (out / "notes.txt").read_text() == "kept" and not (out / "part-0.safetensors").exists()
    with TensorFiles.of(out) as files:
        assert "lm_head.weight" not in files.shapes
        assert torch.equal(files.read("model.embed_tokens.weight"), tensors["model.embed_tokens.weight"])
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(files.nbytes(name) for name in files.shapes)
    assert distance(logits(out), logits(source)) < 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype, tmp_path: Path) -> None:
    source = make(tmp_path / "source", dtype=dtype)
    out = quantize_checkpoint(source, tmp_path / "out", Settings("int4", 32))
    scale = load_file(out / "model-00001-of-00004.safetensors")["model.layers.0.mlp.up_proj.weight_scale"]
    assert scale.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weights": "bf16"}, "weights: 'bf16'.*int4, int8, fp8, nvfp4"),
        ({"weights": "int8", "method": "awq"}, "method for int8: 'awq'.*rtn, gptq"),
        ({"method": "smooth"}, "method for int4: 'smooth'.*rtn, awq, gptq"),
        ({"kv": "fp8_e5m2"}, "kv: 'fp8_e5m2'"),
        ({"kv_sharing": "page"}, "kv_sharing: 'page'"),
        ({"block": (32, 32)}, "block"),
        ({"samples": 0}, "samples"),
        ({"weights": "fp8_e5m2"}, "weights: 'fp8_e5m2' .*int4, int8, fp8, nvfp4$"),
        ({"kv": "fp8_e5m2"}, "kv: 'fp8_e5m2' .*None, fp8$"),
        ({"weights": "fp8", "symmetric": False}, "symmetric for fp8: False"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(QuantizationError, match=message):
        replace(Settings("int4", 32), **changes)


def test_what_is_refused_before_anything_is_written(models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    source, out = models["Llama"], tmp_path / "out"
    refusals = [
        (Settings("int4", 64), r"group of model\.layers\.0\.mlp\.down_proj: 64 .* width 96"),
        (Settings("fp8", block=(64, 64)), r"block of model\.layers\.0\.mlp\.down_proj.*96"),
        (Settings("int4", 32, method="awq"), "calibrate: None.*method awq"),
        (Settings("int4", 32, kv="fp8"), "calibrate: None.*kv fp8"),
    ]
    for settings, message in refusals:
        with pytest.raises(QuantizationError, match=message):
            quantize_checkpoint(source, out, settings)
        assert not out.exists()
    with pytest.raises(QuantizationError, match=r"config\.json"):
        quantize_checkpoint(tmp_path / "nothing", out, Settings("int8"))


def test_destinations_that_are_refused(models: dict[str, Path], text: Path, tmp_path: Path) -> None:
    out = quantize_checkpoint(models["Llama"], tmp_path / "out", Settings("int8"))
    with pytest.raises(QuantizationError, match="begun with other settings"):
        quantize_checkpoint(models["Llama"], out, Settings("fp8"))
    with pytest.raises(QuantizationError, match="begun with other source"):
        quantize_checkpoint(models["Qwen2"], out, Settings("int8"))
    with pytest.raises(QuantizationError, match="quantization_config"):
        quantize_checkpoint(out, tmp_path / "again", Settings("int8"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(QuantizationError, match="destination"):
        quantize_checkpoint(models["Llama"], tmp_path / "full", Settings("int8"))
