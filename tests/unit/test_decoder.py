"""The decoder against transformers on tiny random models, through pages, and what a checkpoint may not be."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tritone.errors import InvalidArgument
from tritone.kernels import Kernels, TorchKernels, default_kernels
from tritone.models.decoder import Batch, Decoder, DecoderConfig, load_decoder

PAGE = 16
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
EXPERTS = {"moe_intermediate_size": 48, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": False}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-llama3": ("Llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-biases-head-dim": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 20}),
    "llama-one-kv-head-linear": ("Llama", {"num_key_value_heads": 1, "rope_parameters": LINEAR}),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied-yarn": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 32, **EXPERTS}),
    "qwen3-moe-some-dense": ("Qwen3Moe", {"head_dim": 32, **EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen3-tied-biases": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True, "attention_bias": True}),
}


def make(name: str, path: Path) -> Any:
    family, options = MODELS[name]
    sizes = {
        "vocab_size": 120,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**{**sizes, **options})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return model


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp(request.param)
    return make(request.param, path), path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    make("qwen2", tmp_path)
    return tmp_path


class Session:
    """Sequences of tokens in one pool; ``run`` feeds some of them their next tokens and gives the logits of each."""

    def __init__(self, decoder: Decoder, sequences: int, longest: int = 64) -> None:
        pages = -(-longest // PAGE)
        self.decoder = decoder
        self.kv = torch.zeros((sequences * pages + 1, *decoder.config.page_shape(PAGE)), dtype=decoder.dtype)
        self.table = (torch.randperm(sequences * pages) + 1).int().view(sequences, pages)
        self.lengths = [0] * sequences

    def run(self, *work: tuple[int, torch.Tensor]) -> list[torch.Tensor]:
        starts, positions = [0], []
        for sequence, tokens in work:
            begin = self.lengths[sequence]
            positions.append(torch.arange(begin, begin + len(tokens)))
            self.lengths[sequence] += len(tokens)
            starts.append(starts[-1] + len(tokens))
        batch = Batch(
            tokens=torch.cat([tokens for _, tokens in work]),
            positions=torch.cat(positions).int(),
            query_starts=starts,
            context_lens=torch.tensor([self.lengths[sequence] for sequence, _ in work], dtype=torch.int32),
            page_table=self.table[[sequence for sequence, _ in work]],
        )
        logits = self.decoder.logits(self.decoder.forward(batch, self.kv))
        return list(logits.split([end - begin for begin, end in pairwise(starts)]))


def reference(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(tokens[None]).logits[0]
    return logits


@pytest.mark.parametrize("kernels", [default_kernels(), TorchKernels()], ids=["default", "torch"])
def test_logits_equal_transformers(pair: tuple[Any, Path], kernels: Kernels) -> None:
    model, path = pair
    decoder = load_decoder(path, torch.float32, kernels=kernels)
    tokens = torch.randint(0, 120, (61,))
    expected = reference(model, tokens)
    near = {"rtol": 2e-4, "atol": 2e-5}
    session = Session(decoder, 3)
    torch.testing.assert_close(session.run((0, tokens))[0], expected, **near)
    cuts = [0, 1, 17, 32, 61]
    chunked = torch.cat([session.run((1, tokens[a:b]))[0] for a, b in pairwise(cuts)])
    torch.testing.assert_close(chunked, expected, **near)
    stepped = torch.cat([session.run((2, token[None]))[0] for token in tokens])
    torch.testing.assert_close(stepped, expected, **near)


def test_a_mixed_batch_equals_transformers(pair: tuple[Any, Path]) -> None:
    model, path = pair
    session = Session(load_decoder(path, torch.float32), 4)
    prompts = [torch.randint(0, 120, (length,)) for length in (15, 16, 33, 40)]
    expected = [reference(model, prompt) for prompt in prompts]
    session.run((0, prompts[0][:-1]), (3, prompts[3][:10]))
    session.run((1, prompts[1][:-1]))
    found = session.run((0, prompts[0][-1:]), (1, prompts[1][-1:]), (2, prompts[2]), (3, prompts[3][10:]))
    for logits, whole in zip(found, expected, strict=True):
        torch.testing.assert_close(logits, whole[-len(logits) :], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_bits_depend_on_nothing_else(pair: tuple[Any, Path], dtype: torch.dtype) -> None:
    if default_kernels().name == "torch":
        pytest.skip("native kernels only")
    decoder = load_decoder(pair[1], dtype)
    prompts = [torch.randint(0, 120, (length,)) for length in (33, 16, 1, 40, 17, 9, 20)]
    together = Session(decoder, 7)
    one_shot = together.run(*enumerate(prompts))
    next_token = torch.tensor([5])
    step = together.run(*[(sequence, next_token) for sequence in range(7)])
    alone = Session(decoder, 7)
    for sequence, prompt in enumerate(prompts):
        pieces = [alone.run((sequence, piece))[0] for piece in prompt.split(7)]
        assert torch.equal(torch.cat(pieces), one_shot[sequence])
        assert torch.equal(alone.run((sequence, next_token))[0], step[sequence])


def test_bfloat16_follows_float32(pair: tuple[Any, Path]) -> None:
    model, path = pair
    tokens = torch.randint(0, 120, (40,))
    found = Session(load_decoder(path, torch.bfloat16), 1).run((0, tokens))[0]
    expected = reference(model, tokens)
    assert float((found - expected).norm() / expected.norm()) < 0.03


def test_input_embeddings_replace_tokens(checkpoint: Path) -> None:
    decoder = load_decoder(checkpoint, torch.float32)
    tokens = torch.randint(0, 120, (5,))
    args = [torch.arange(5).int(), [0, 5], torch.tensor([5]).int(), torch.zeros(1, 1).int()]
    kv = torch.zeros((1, *decoder.config.page_shape(PAGE)))
    expected = decoder.forward(Batch(tokens, *args), kv)
    embedded = decoder.embed(tokens)
    kept = embedded.clone()
    assert torch.equal(decoder.forward(Batch(torch.zeros_like(tokens), *args), kv, embedded), expected)
    assert torch.equal(embedded, kept)


def test_tokens_and_positions_out_of_range_are_index_errors(checkpoint: Path) -> None:
    decoder = load_decoder(checkpoint, torch.float32)
    for tokens in (torch.tensor([120]), torch.tensor([-1])):
        with pytest.raises(IndexError):
            Session(decoder, 1).run((0, tokens))
    session = Session(decoder, 1, longest=16)
    session.lengths[0] = 16
    with pytest.raises(IndexError):
        session.run((0, torch.tensor([1])))
    beyond = Session(decoder, 1, longest=256)
    beyond.lengths[0] = 128
    with pytest.raises(IndexError, match="128 positions"):
        beyond.run((0, torch.tensor([1])))


def test_shards_give_the_same_decoder_and_report_progress(checkpoint: Path) -> None:
    seen: list[tuple[int, int]] = []
    whole = load_decoder(checkpoint, torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]
    tensors = load_file(checkpoint / "model.safetensors")
    names = list(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, checkpoint / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    (checkpoint / "model.safetensors").unlink()
    tokens = torch.arange(9)
    expected = Session(whole, 1).run((0, tokens))[0]
    assert torch.equal(Session(load_decoder(checkpoint, torch.float32), 1).run((0, tokens))[0], expected)
    (checkpoint / "b.safetensors").unlink()
    with pytest.raises(InvalidArgument, match="b.safetensors"):
        load_decoder(checkpoint)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"layers.1.mlp.up_proj.weight: 'missing'.*\[96, 64\]"),
        (lambda t: t.update(surprise=torch.zeros(3)), r"tensor surprise: \[3\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(63)}), r"model.norm.weight: \[63\].*\[64\]"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(64, dtype=torch.int8)}), r"model.norm.weight: 'I8'.*BF16"),
    ],
)
def test_tensors_must_be_those_of_the_config(checkpoint: Path, edit: Any, message: str) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    edit(tensors)
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(InvalidArgument, match=message):
        load_decoder(checkpoint)


def test_broken_files_are_named(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").write_bytes(b"\x10\0\0\0")
    with pytest.raises(InvalidArgument, match="model.safetensors"):
        load_decoder(checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(InvalidArgument, match="model.safetensors.index.json"):
        load_decoder(checkpoint)
    (checkpoint / "config.json").unlink()
    with pytest.raises(InvalidArgument, match="config.json"):
        load_decoder(checkpoint)
    with pytest.raises(InvalidArgument, match=r"dtype: 'torch.float16'.*torch.bfloat16"):
        load_decoder(checkpoint, torch.float16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma3_text"}, r"model_type: 'gemma3_text'.*llama, qwen2, qwen3"),
        ({"model_type": None}, "model_type: None"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "architectures.*ForCausalLM"),
        ({"hidden_act": "gelu"}, r"hidden_act: 'gelu'.*silu"),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1, "layer_types": None}, "sliding_window: 32"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "rope_type: 'dynamic'.*llama3, yarn"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3.*4"),
    ],
)
def test_configs_that_are_refused(checkpoint: Path, change: dict[str, Any], message: str) -> None:
    file = checkpoint / "config.json"
    config = {**json.loads(file.read_text()), **change}
    file.write_text(json.dumps(config))
    with pytest.raises(InvalidArgument, match=message):
        DecoderConfig.from_directory(checkpoint)


def test_an_older_config_gives_the_same_rope(tmp_path: Path) -> None:
    make("llama-tied-llama3", tmp_path)
    new = DecoderConfig.from_directory(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    scaling = dict(config.pop("rope_parameters"))
    config["rope_theta"] = scaling.pop("rope_theta")
    config["rope_scaling"] = scaling
    file.write_text(json.dumps(config))
    assert DecoderConfig.from_directory(tmp_path) == new
    assert new.rope_frequencies[0] == 1.0 and len(new.rope_frequencies) == new.head_dim // 2
