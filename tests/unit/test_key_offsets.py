"""The constant that e4m3 keys are without: against transformers' keys, and the stages that use one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.unit.helpers import byte_level_tokenizer
from tritone.deployment import Deployment
from tritone.errors import TritoneError
from tritone.kernels import QuantizedPages, default_kernels
from tritone.models.decoder import Batch, key_offsets, load_decoder
from tritone.models.decoder.key_offsets import POSITIONS, TEXT
from tritone.stages.build import build_engine
from tritone.supervisor import resolve_deployment

LAYERS, HEADS, WIDTH = 2, 2, 16
SCALES = torch.ones(LAYERS, 2, HEADS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    config = transformers.Qwen2Config(
        vocab_size=400,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
    )
    model = transformers.Qwen2ForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.k_proj.bias, std=3.0)
    model.save_pretrained(path)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def test_they_are_the_mean_key_over_all_positions(checkpoint: Path) -> None:
    """What transformers has after the key projection, turned to each of 2048 positions in numpy, and averaged."""
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    keys: list[np.ndarray] = []
    for layer in theirs.model.layers:
        layer.self_attn.k_proj.register_forward_hook(lambda _, __, out: keys.append(out[0].double().numpy()))
    ids = byte_level_tokenizer().encode(TEXT.read_text(encoding="utf-8")).ids[:256]
    with torch.inference_mode():
        theirs(torch.tensor([ids]))
    angle = np.arange(POSITIONS)[:, None] * 50000.0 ** -(np.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = np.cos(angle).mean(0), np.sin(angle).mean(0)
    expected = []
    for layer_keys in keys:
        a, b = np.split(layer_keys[4:].mean(0).reshape(HEADS, WIDTH), 2, axis=1)
        expected.append(np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=1))
    found = key_offsets(load_decoder(checkpoint, torch.float32), byte_level_tokenizer(), SCALES)
    assert found.shape == (LAYERS, HEADS, WIDTH) and found.dtype == torch.float32 and found.is_contiguous()
    assert np.abs(np.stack(expected)).max() > 1
    # Moved by half a code at most: a sixteenth of the mixed first key.
    moved = np.linalg.norm(found.numpy() - np.stack(expected), axis=-1)
    first = np.stack([layer_keys[0].reshape(HEADS, WIDTH) for layer_keys in keys])
    assert (moved <= np.linalg.norm(first - np.stack(expected), axis=-1) / 16).all()


def test_the_first_key_of_a_text_becomes_codes_without_error(checkpoint: Path) -> None:
    decoder = load_decoder(checkpoint, torch.float32)
    ids = byte_level_tokenizer().encode(TEXT.read_text(encoding="utf-8")).ids[:1]
    wide = torch.zeros(1, *decoder.config.page_shape(32))
    zero = torch.zeros(1, dtype=torch.int32)
    decoder.forward(Batch(torch.tensor(ids), zero, [0, 1], zero + 1, zero[None]), wide)
    errors = []
    for offsets in (None, key_offsets(decoder, byte_level_tokenizer(), SCALES)):
        codes = QuantizedPages(torch.zeros(wide.shape, dtype=torch.uint8).view(torch.float8_e4m3fn), SCALES, offsets)
        back = torch.zeros_like(wide)
        default_kernels().convert_pages(wide, [0], codes, [0], 1)
        default_kernels().convert_pages(codes, [0], back, [0], 1)
        errors.append(float((back - wide)[0, :, 0, :, 0].abs().max()))
    assert errors[1] < 1e-4 < 0.01 < errors[0]


def test_the_context_that_is_loaded_changes_little(checkpoint: Path) -> None:
    whole, half = (key_offsets(load_decoder(checkpoint, max_positions=n), byte_level_tokenizer(), SCALES) for n in (256, 128))
    assert float((whole - half).abs().mean()) < 0.1 * float(whole.abs().mean())


def test_keys_that_are_not_finite_are_refused_by_layer(checkpoint: Path) -> None:
    decoder = load_decoder(checkpoint)
    with torch.inference_mode():
        decoder.layers[1].input_norm.fill_(float("nan"))
    with pytest.raises(TritoneError, match=r"layer 1: keys"):
        key_offsets(decoder, byte_level_tokenizer(), SCALES)


@pytest.mark.parametrize(("prefill", "decode"), [("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"), ("fp8", "bf16")])
def test_only_codes_that_no_other_stage_reads_have_offsets(
    checkpoint: Path, tmp_path: Path, prefill: str, decode: str
) -> None:
    written = {
        "checkpoint": str(checkpoint),
        "voice": None,
        "max_context": 128,
        "prefill": {"kv": prefill},
        "decode": {"kv": decode},
    }
    deployment = resolve_deployment(Deployment.parse(written, "t"), tmp_path)
    for name, part in (("prefill", deployment.prefill), ("decode", deployment.decode)):
        kv = build_engine(deployment, part, tmp_path, name)[0].kv
        offsets = kv.offsets if isinstance(kv, QuantizedPages) else None
        assert (offsets is not None) == (name == "decode" and (prefill, decode) == ("bf16", "fp8"))
        if offsets is not None:
            dtype = getattr(torch, part.dtype)  # what the CPU is fast at, unless the deployment says another
            again = key_offsets(load_decoder(checkpoint, dtype, max_positions=128), byte_level_tokenizer(), SCALES)
            assert torch.equal(offsets, again), "another load gives the same bits"
