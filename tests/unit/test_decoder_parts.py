"""The decoders of omni checkpoints: their parts, experts and rotary positions, against transformers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantization.errors import QuantizationError
from quantization.quantize import Settings, quantize_checkpoint
from tests.omni_prompts import FAMILIES, checkpoint, decoder
from tests.unit.test_decoder import make
from tritone.errors import InvalidArgument
from tritone.kernels import default_kernels
from tritone.models.decoder import Batch, Decoder, DecoderConfig, load_decoder
from tritone.models.decoder.handed import Handed
from tritone.models.decoder.linear import QuantizedLinear
from tritone.models.decoder.mlp import SparseMlp
from tritone.models.decoder.rope import rope_rows

PAGE = 16


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for all modules, so that each checkpoint is made once."""
    return tmp_path_factory.getbasetemp() / "omni"


def run(model: Decoder, inputs: torch.Tensor, rotary: torch.Tensor | None = None) -> torch.Tensor:
    """Final hidden states of one sequence of ``inputs`` [T, hidden]."""
    count = len(inputs)
    pages = -(-count // PAGE)
    kv = torch.zeros((pages, *model.config.page_shape(PAGE)), dtype=model.dtype)
    positions, table = torch.arange(count, dtype=torch.int32), torch.arange(pages, dtype=torch.int32)[None]
    length = torch.tensor([count], dtype=torch.int32)
    return model.forward(Batch(torch.zeros(count, dtype=torch.int64), positions, [0, count], length, table, rotary), kv, inputs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["thinker", "talker"])
def test_each_part_is_a_decoder_with_positions_of_three_axes(family: str, part: str, directory: Path) -> None:
    whole, _, path = checkpoint(family, directory)
    model = load_decoder(path, torch.float32, part=part, max_positions=64)
    inputs = torch.randn(40, model.config.hidden_size)
    rotary = torch.randint(0, 64, (3, 40), dtype=torch.int32)
    reference = getattr(whole, part).model
    reference = getattr(reference, "language_model", reference)
    with torch.no_grad():
        wanted = reference(inputs_embeds=inputs[None], position_ids=rotary[:, None].long()).last_hidden_state[0]
    torch.testing.assert_close(run(model, inputs, rotary), wanted, rtol=2e-4, atol=2e-4)
    places = torch.arange(40, dtype=torch.int32)
    assert torch.equal(run(model, inputs), run(model, inputs, places.expand(3, 40)))
    assert not torch.equal(run(model, inputs), run(model, inputs, rotary))


def test_the_axes_of_frequencies(directory: Path) -> None:
    """Sections of 4, 6 and 6: in turn (time has what is left), and one after the other."""
    interleaved = tuple("thwthwthwthwthwthwt".index(letter) for letter in "thwthwthwthwthwthwt"[:16])
    assert decoder("qwen3", directory).config.rope_axes == (0, 1, 2) * 5 + (0,) == interleaved
    assert decoder("qwen2.5", directory).config.rope_axes == (0,) * 4 + (1,) * 6 + (2,) * 6


def test_a_position_outside_the_table_is_an_index_error(directory: Path) -> None:
    model = decoder("qwen2.5", directory)
    rotary = torch.zeros(3, 4, dtype=torch.int32)
    rotary[1, 2] = 512
    assert model.config.rope_axes is not None
    for wrong in (rotary, rotary - 1):
        with pytest.raises(IndexError, match="512 positions"):
            rope_rows(model.rope, model.config.rope_axes, wrong)


def sparse(model: Decoder) -> SparseMlp:
    mlp = model.layers[0].mlp
    assert isinstance(mlp, SparseMlp)
    return mlp


@pytest.mark.parametrize(("weights", "bound"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.2)])
def test_experts_are_quantised_and_their_router_is_not(weights: str, bound: float, directory: Path) -> None:
    path = checkpoint("qwen3", directory)[2]
    dense, found = sparse(decoder("qwen3", directory)), sparse(load_decoder(path, torch.float32, weights=weights, group=32))
    x = torch.randn(24, 128)
    assert torch.equal(found.router(x), dense.router(x))
    assert 0.001 < (found(x) - dense(x)).norm() / dense(x).norm() < bound
    assert found.nbytes - found.router.nbytes < (dense.nbytes - dense.router.nbytes) / 2


def test_a_quantised_checkpoint_with_experts_loads(tmp_path: Path) -> None:
    made = tmp_path / "dense"
    make("qwen3-moe", made)
    dense, x = sparse(load_decoder(made, torch.float32)), torch.randn(24, 64)
    for weights, bound in (("int8", 0.02), ("fp8", 0.06)):
        written = quantize_checkpoint(made, tmp_path / weights, Settings(weights))
        found = sparse(load_decoder(written, torch.float32))
        assert isinstance(found.experts[5].down, QuantizedLinear)
        assert torch.equal(found.router(x), dense.router(x))
        assert 0.001 < (found(x) - dense(x)).norm() / dense(x).norm() < bound


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_of_an_omni_checkpoint_the_thinker_alone_is_quantised(family: str, directory: Path, tmp_path: Path) -> None:
    path = checkpoint(family, directory)[2]
    written = quantize_checkpoint(path, tmp_path / "fp8", Settings("fp8"))
    before, after = load_file(path / "model.safetensors"), {}
    for file in written.glob("*.safetensors"):
        after |= load_file(file)
    changed = {name for name in before if name not in after or before[name].dtype != after[name].dtype}
    assert changed and all(re.fullmatch(r"thinker\.model\.layers\.\d\..*_proj\.weight", name) for name in changed)
    kept = before.keys() - changed
    assert all(torch.equal(before[name], after[name]) for name in kept)
    assert any(name.startswith("thinker.visual.") for name in kept) and any(name.startswith("talker.") for name in kept)
    x = torch.randn(24, 128)
    dense, found = (load_decoder(place, torch.float32).layers[0].mlp for place in (path, written))
    assert 0.001 < (found(x) - dense(x)).norm() / dense(x).norm() < 0.06
    file = tmp_path / "text.txt"
    file.write_text("Hello, how are you today? " * 50)
    with pytest.raises(QuantizationError, match="model_type for calibration.*qwen.*omni.*allowed.*llama"):
        quantize_checkpoint(path, tmp_path / "gptq", Settings("int4", group=32, method="gptq"), file)


def test_a_token_never_depends_on_its_neighbours_experts(directory: Path) -> None:
    if default_kernels().name == "torch":
        pytest.skip("native kernels only")
    for dtype in (torch.float32, torch.bfloat16):
        for part in ("thinker", "talker"):
            mlp = sparse(load_decoder(checkpoint("qwen3", directory)[2], dtype, part=part, max_positions=64))
            x = torch.randn(17, mlp.router.in_features).to(dtype)
            whole = mlp(x)
            assert all(torch.equal(mlp(x[n : n + 1])[0], whole[n]) for n in range(17))
            assert torch.equal(mlp(x.flip(0)).flip(0), whole)


def test_stacked_experts_are_read_too(directory: Path, tmp_path: Path) -> None:
    path = checkpoint("qwen3", directory)[2]
    shutil.copy(path / "config.json", tmp_path)
    tensors = load_file(path / "model.safetensors")
    for layer in range(4):
        base = f"thinker.model.layers.{layer}.mlp.experts"
        names = {kind: [f"{base}.{n}.{kind}_proj.weight" for n in range(8)] for kind in ("gate", "up", "down")}
        parts = {kind: torch.stack([tensors.pop(name) for name in names[kind]]) for kind in names}
        tensors[f"{base}.gate_up_proj"] = torch.cat((parts["gate"], parts["up"]), dim=1)
        tensors[f"{base}.down_proj"] = parts["down"]
    save_file(tensors, tmp_path / "model.safetensors")
    x = torch.randn(9, 128)
    assert torch.equal(sparse(load_decoder(tmp_path, torch.float32))(x), sparse(decoder("qwen3", directory))(x))


def test_a_part_is_named(directory: Path) -> None:
    path = checkpoint("qwen3", directory)[2]
    assert DecoderConfig.from_directory(path) == DecoderConfig.from_directory(path, "thinker")
    with pytest.raises(InvalidArgument, match=r"part: 'listener'.*thinker, talker"):
        DecoderConfig.from_directory(path, "listener")


def changed(path: Path, to: Path, **changes: Any) -> Path:
    """The configuration with other values; ``a__b`` is b in a."""
    config = json.loads((path / "config.json").read_text())
    for name, value in changes.items():
        *sections, key = name.split("__")
        section = config
        for entry in sections:
            section = section[entry]
        section[key] = value
    (to / "config.json").write_text(json.dumps(config))
    return to


def test_what_the_talker_is_handed_is_in_the_configuration(directory: Path, tmp_path: Path) -> None:
    qwen3, qwen25 = (checkpoint(family, directory)[2] for family in FAMILIES)
    assert DecoderConfig.from_directory(qwen3).handed == Handed(2, summed=False)
    assert DecoderConfig.from_directory(qwen25).handed == Handed(4, summed=True)
    assert DecoderConfig.from_directory(qwen3, "talker").handed is None
    silent = changed(qwen3, tmp_path, enable_audio_output=False)
    assert DecoderConfig.from_directory(silent).handed is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"talker_config__accept_hidden_layer": 5}, r"accept_hidden_layer: 5.*1 to the thinker's layers \(4\)"),
        ({"talker_config__accept_hidden_layer": 0}, "accept_hidden_layer: 0"),
        ({"thinker_config__text_config__num_experts_per_tok": 9}, r"num_experts_per_tok: 9.*\(8\)"),
        ({"thinker_config__text_config__rope_parameters": {"rope_theta": 1e6, "mrope_section": [4, 6, 5]}}, "section.*16"),
        ({"architectures": ["Qwen3OmniMoeForCausalLM"]}, "architectures.*ForConditionalGeneration"),
    ],
)
def test_omni_configs_that_are_refused(change: dict[str, Any], message: str, directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=message):
        DecoderConfig.from_directory(changed(checkpoint("qwen3", directory)[2], tmp_path, **change))
