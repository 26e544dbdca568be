"""What a plan counts: the tiny checkpoints' own tensors, Qwen3-Omni-30B-A3B by hand, and the demo as it is served."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.omni.tiny import make_qwen3_omni, make_qwen25_omni
from tritone.deployment import Deployment
from tritone.errors import InvalidArgument
from tritone.models.decoder import parts
from tritone.models.decoder.config import _PLAIN
from tritone.planning import Memory, Model, Plan, plan, read_model
from tritone.planning.memory import parse_size, shown
from tritone.planning.tensors import Precision, Tensors
from tritone.sizes import required_shared_memory
from tritone.supervisor import resolve_deployment
from tritone.supervisor.resolve import SERVED_MODEL_TYPES

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"
GPU = Memory("--gpu-memory", "141GB", 141 * 10**9)

# The sizes of Qwen/Qwen3-Omni-30B-A3B-Instruct's config.json, put together from public copies of the file in other projects
# (none could be fetched from the hub here). Token ids, rotary positions and the like are left out: no size follows from them.
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3OmniMoeForConditionalGeneration"],
    "model_type": "qwen3_omni_moe",
    "enable_audio_output": True,
    "thinker_config": {
        "audio_config": {"num_mel_bins": 128, "encoder_layers": 32, "encoder_ffn_dim": 5120, "d_model": 1280,
                         "output_dim": 2048, "downsample_hidden_size": 480},
        "vision_config": {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 2048,
                          "patch_size": 16, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2,
                          "num_position_embeddings": 2304, "deepstack_visual_indexes": [8, 16, 24]},
        "text_config": {"vocab_size": 152064, "hidden_size": 2048, "intermediate_size": 768, "num_hidden_layers": 48,
                        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
                        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": [],
                        "attention_bias": False, "max_position_embeddings": 65536},
    },
    "talker_config": {
        "thinker_hidden_size": 2048,
        "text_config": {"vocab_size": 3072, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 20,
                        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "num_experts": 128,
                        "num_experts_per_tok": 6, "moe_intermediate_size": 384, "shared_expert_intermediate_size": 768,
                        "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
        "code_predictor_config": {"vocab_size": 2048, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 5,
                                  "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_code_groups": 16,
                                  "attention_bias": False},
    },
    "code2wav_config": {"codebook_size": 2048, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16,
                        "intermediate_size": 3072, "num_hidden_layers": 8, "num_quantizers": 16,
                        "upsample_rates": [8, 5, 4, 3], "upsampling_ratios": [2, 2], "decoder_dim": 1536},
}  # fmt: skip


def written(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"qwen3": tmp_path_factory.mktemp("plan3"), "qwen25": tmp_path_factory.mktemp("plan25")}
    make_qwen3_omni(made["qwen3"], torch.bfloat16)
    make_qwen25_omni(made["qwen25"])
    return made


def with_weights(directory: Path) -> Path:
    """As far as a look at the directory goes; nothing reads them."""
    for name in ("tokenizer.json", "model.safetensors"):
        (directory / name).touch()
    return directory


def measured(directory: Path, *prefixes: str) -> tuple[int, int]:
    """Elements and bytes of the tensors whose names begin so, from the headers of the safetensors files."""
    elements = nbytes = 0
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        for name, tensor in header.items():
            if name != "__metadata__" and name.startswith(prefixes):
                elements += prod(tensor["shape"])
                nbytes += tensor["data_offsets"][1] - tensor["data_offsets"][0]
    return elements, nbytes


PARTS = {
    "audio tower": ("thinker.audio_tower.",),
    "vision tower": ("thinker.visual.",),
    "thinker": ("thinker.model.", "thinker.lm_head."),
    "talker": ("talker.model.", "talker.codec_head.", "talker.text_projection.", "talker.hidden_projection.",
               "talker.thinker_to_talker_proj."),
    "code predictor": ("talker.code_predictor.",),
    "code2wav": ("code2wav.",),
    "token2wav dit": ("token2wav.code2wav_dit_model.",),
    "token2wav bigvgan": ("token2wav.code2wav_bigvgan_model.",),
}  # fmt: skip


@pytest.mark.parametrize("family", ["qwen3", "qwen25"])
def test_every_part_is_what_the_files_hold(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    directory = tiny[family]
    # A directory with nothing but the configuration must do.
    model = read_model(written(tmp_path / "bare", json.loads((directory / "config.json").read_text())))
    parts = (*model.towers, *model.thinker, *model.talker, *model.voicebox)
    for part in parts:
        assert part.parameters == measured(directory, *PARTS[part.name])[0], part.name
    assert sum(part.parameters for part in parts) == measured(directory, "")[0]


@pytest.mark.parametrize(("family", "kind"), [("qwen3", "bf16"), ("qwen25", "float32")])
def test_bytes_of_a_stage_are_those_of_the_files(family: str, kind: str, tiny: dict[str, Path]) -> None:
    deployment = Deployment.parse({"voice": "checkpoint", "prefill": {"weights": kind}, "decode": {"weights": kind}}, "t")
    planned = plan(deployment, read_model(tiny[family]), Memory("--memory", "1GB", 10**9, kind))
    held = {stage.name: stage.weight_bytes for stage in planned.stages}
    assert held["prefill"][kind] == measured(tiny[family], "thinker.")[1]
    assert held["decode"][kind] == measured(tiny[family], "thinker.model.", "thinker.lm_head.")[1]
    assert held["talker"][kind] == measured(tiny[family], "talker.")[1]
    # Vocoders compute in float32.
    assert held["voicebox"] == {"float32": 4 * measured(tiny[family], "code2wav.", "token2wav.")[0]}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return read_model(written(tmp_path_factory.mktemp("published"), QWEN3_30B))


def test_qwen3_omni_30b_by_hand(published: Model) -> None:
    # Thinker, a layer: q and o 2 x (32 x 128) x 2048 = 16,777,216; k and v 2 x (4 x 128) x 2048 = 2,097,152;
    # experts 128 x 3 x 768 x 2048 = 603,979,776; router 128 x 2048 = 262,144; norms 2 x 2048 + 2 x 128 = 4,352.
    layer = 16_777_216 + 2_097_152 + 603_979_776 + 262_144 + 4_352
    assert layer == 623_120_640
    # 48 layers, embedding and head of 152064 x 2048 = 311,427,072 each, the last norm: 30.5 B, as the model's card says.
    (thinker,) = published.thinker
    assert thinker.parameters == 48 * layer + 2 * 311_427_072 + 2048 == 30_532_646_912
    assert thinker.quantisable == 48 * (16_777_216 + 2_097_152 + 603_979_776) == 29_896_998_912

    # Talker, a layer: q and o 2 x (16 x 128) x 1024 = 4,194,304; k and v 2 x (2 x 128) x 1024 = 524,288; experts
    # 128 x 3 x 384 x 1024 = 150,994,944; shared expert 3 x 768 x 1024 = 2,359,296 and its gate 1,024; router 131,072;
    # norms 2 x 1024 + 2 x 128 = 2,304.
    layer = 4_194_304 + 524_288 + 150_994_944 + 2_359_296 + 1_024 + 131_072 + 2_304
    # Two projections of 2048 x 2048 + 2048 and 1024 x 2048 + 1024; codes in and out 2 x 3072 x 1024; the last norm.
    talker, predictor = published.talker
    assert talker.parameters == 20 * layer + 2 * (4_196_352 + 2_098_176) + 6_291_456 + 1024 == 3_183_026_176
    # Code predictor, a layer: q and o 4,194,304; k and v 2 x (8 x 128) x 1024 = 2,097,152; MLP 3 x 3072 x 1024 = 9,437,184;
    # norms 2,304. 15 embeddings and 15 heads of 2048 x 1024, the last norm.
    assert predictor.parameters == 5 * (4_194_304 + 2_097_152 + 9_437_184 + 2_304) + 30 * 2_097_152 + 1024 == 141_570_304


def test_plan_of_qwen3_omni_30b_by_hand(published: Model) -> None:
    planned = plan(Deployment.load(DEPLOYMENTS / "qwen3-omni-30b.yaml"), published, GPU)
    prefill, decode, talker, voicebox = planned.stages
    # 2 x 48 layers x 4 heads x 128 = 49,152 elements a token; the Talker's 2 x 20 x 2 x 128 = 10,240.
    assert prefill.kv_bytes == decode.kv_bytes == {"bf16": 98_304, "fp8": 49_152}
    assert talker.kv_bytes == {"bf16": 20_480, "fp8": 10_240}
    # FP8: a byte for each of 29,896,998,912, a float32 scale for each row: q 4096, k and v 512 each, o 2048, 128 experts of
    # 768 + 768 + 2048, in 48 layers; the remaining 635,648,000 in bfloat16.
    rows = 48 * (4096 + 2 * 512 + 2048 + 128 * (768 + 768 + 2048))
    assert decode.weight_bytes["fp8"] == 29_896_998_912 + 4 * rows + 2 * (30_532_646_912 - 29_896_998_912)
    assert decode.weight_bytes["bf16"] == 61_065_293_824
    pages, hidden = decode.pools
    assert (pages.blocks, pages.block_bytes) == (8192, 32 * 49_152)
    assert (hidden.blocks, hidden.block_bytes) == (16384, 8 * 2048 * 2)
    assert planned.nbytes == sum(s.weight_bytes[s.weights] + s.pool_bytes for s in planned.stages) <= GPU.nbytes
    assert planned.context == 32768 and planned.sessions(decode, 262_144) == 8
    assert voicebox.kv_bytes == {} and planned.shortage() == ""


QWEN25_7B: dict[str, Any] = {
    "architectures": ["Qwen2_5OmniModel"],
    "model_type": "qwen2_5_omni",
    "thinker_config": {
        "audio_config": {"output_dim": 3584},
        "vision_config": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "out_hidden_size": 3584},
        "text_config": {"vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
                        "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 32768},
    },
    "talker_config": {"vocab_size": 8448, "hidden_size": 896, "embedding_size": 3584, "intermediate_size": 18944,
                      "num_hidden_layers": 24, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 128},
    "token2wav_config": {"dit_config": {}, "bigvgan_config": {}},
}  # fmt: skip
"""Of Qwen/Qwen2.5-Omni-7B, as above; towers and vocoder are transformers' own defaults."""


def test_qwen25_omni_7b_by_hand(tmp_path: Path) -> None:
    model = read_model(written(tmp_path / "7b", QWEN25_7B))
    # Thinker, a layer: q and o 2 x 3584 x 3584; k and v 2 x 512 x 3584; biases of q, k, v; MLP 3 x 18944 x 3584; two norms.
    layer = 25_690_112 + 3_670_016 + (3584 + 2 * 512) + 203_685_888 + 2 * 3584
    # 28 layers, embedding and head of 152064 x 3584 each, the last norm: Qwen2.5-7B, as published.
    (thinker,) = model.thinker
    assert thinker.parameters == 28 * layer + 2 * 544_997_376 + 3584 == 7_615_616_512
    # Talker, a layer: q and o 2 x 1536 x 896; k and v 2 x 512 x 896; biases of q, k, v; MLP 3 x 18944 x 896; two norms.
    layer = 2_752_512 + 917_504 + (1536 + 2 * 512) + 50_921_472 + 2 * 896
    # Codes in 8448 x 3584 and out 8448 x 896, the projection of 3584 x 896 + 896, the last norm.
    (talker,) = model.talker
    assert talker.parameters == 24 * layer + 30_277_632 + 7_569_408 + 3_212_160 + 896 == 1_351_360_256
    planned = plan(Deployment.load(DEPLOYMENTS / "qwen2.5-omni-7b.yaml"), model, GPU)
    # 2 x 28 layers x 4 heads x 128 and 2 x 24 x 4 x 128 elements of two bytes.
    assert [stage.kv_bytes.get("bf16") for stage in planned.stages] == [57_344, 57_344, 49_152, None]


@pytest.mark.parametrize(("stage", "row"), [("prefill", 2 * 2048), ("decode", 0)])
def test_what_fits_is_filled_to_the_last_page(stage: str, row: int, published: Model) -> None:
    """Beside each token prefill keeps what the Talker gets of it: one vector of the Thinker's width."""
    data = Deployment.load(DEPLOYMENTS / "qwen3-omni-30b.yaml").model_dump()
    planned = plan(Deployment.parse(data, "t"), published, GPU)
    (found,) = (one for one in planned.stages if one.name == stage)
    tokens = planned.tokens(found, found.weights, found.kv)
    assert found.token_bytes(found.kv) == found.kv_bytes[found.kv] + row

    def again(pool: int) -> Plan:
        return plan(Deployment.parse(data | {stage: data[stage] | {"pool_tokens": pool}}, "t"), published, GPU)

    assert tokens > data[stage]["pool_tokens"] and tokens % 32 == 0
    assert again(tokens).shortage() == "" and "more than --gpu-memory 141GB" in again(tokens + 32).shortage()


def test_sessions_begin_pages_of_their_own(published: Model) -> None:
    planned = plan(Deployment.parse({"voice": None}, "t"), published, GPU, context=33)
    assert [planned.sessions(planned.stages[0], tokens) for tokens in (63, 64, 127, 128)] == [0, 1, 1, 2]


@pytest.mark.parametrize("name", ["qwen3", "qwen25"])
def test_deployment_files_with_a_tiny_checkpoint(name: str, tiny: dict[str, Path]) -> None:
    file = {"qwen3": "qwen3-omni-30b.yaml", "qwen25": "qwen2.5-omni-7b.yaml"}[name]
    planned = plan(Deployment.load(DEPLOYMENTS / file), read_model(tiny[name]), GPU)
    assert [stage.name for stage in planned.stages] == ["prefill", "decode", "talker", "voicebox"]


def test_the_plan_of_a_dense_checkpoint_is_what_the_server_takes(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 48,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 3,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    }  # fmt: skip
    checkpoint = with_weights(written(tmp_path / "dense", config))
    stages = {"decode": {"kv": "fp8", "weights": "bf16"}, "prefill": {"weights": "bf16"}}
    data = {"checkpoint": str(checkpoint), "voice": None, **stages}
    deployment = Deployment.parse(data, "t")
    resolved = resolve_deployment(deployment, tmp_path)
    planned = plan(deployment, read_model(checkpoint), GPU)
    assert sum(stage.pool_bytes for stage in planned.stages) == required_shared_memory(resolved)
    # q and o 48 x 48, k and v 24 x 48, MLP 3 x 96 x 48, norms 2 x 48, in two layers; embedding 64 x 48; the last norm.
    assert planned.stages[0].weight_bytes["bf16"] == 2 * (2 * (2 * 2304 + 2 * 1152 + 3 * 4608 + 96) + 3072 + 48)


def test_bytes_of_a_matrix() -> None:
    one = Tensors("m", (3, 100), 2, quantisable=True)
    assert Precision("bf16", "float32").nbytes(one) == 1200
    assert Precision("int8", "bf16").nbytes(one) == 2 * 3 * (100 + 4)
    # Groups of 64: two scales of two bytes a row, the second of a short group.
    assert Precision("int4", "bf16", 64).nbytes(one) == 2 * 3 * (50 + 2 * 2)
    assert Precision("int4", "bf16", 64).nbytes(Tensors("norm", (100,))) == 200


def test_sizes_of_memory() -> None:
    assert (parse_size("x", "141GB"), parse_size("x", "80 GiB"), parse_size("x", "0.5kb")) == (141 * 10**9, 80 * 2**30, 500)
    assert (shown(999), shown(61_065_293_824), shown(141 * 10**9)) == ("999 B", "61.1 GB", "141 GB")
    for text in ("141", "GB", "0GB", "-1GB", "1e3GB", "12XB"):
        with pytest.raises(InvalidArgument, match=rf"--gpu-memory: '{text}'.*such as 141GB"):
            parse_size("--gpu-memory", text)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("architectures", ["MistralForCausalLM"], "architectures.*MistralForCausalLM.*Qwen3OmniMoeForConditionalGeneration"),
        ("thinker_config", None, "thinker_config: None"),
        ("thinker_config.text_config.num_experts", 0, r"thinker_config.text_config.num_experts: 0 .*at least 1"),
        ("talker_config.text_config.hidden_size", "wide", "talker_config.text_config.hidden_size: 'wide'"),
        ("code2wav_config.upsample_rates", 5, "code2wav_config.upsample_rates: 5"),
    ],
)
def test_a_wrong_field_of_the_configuration_is_named(path: str, value: Any, told: str, tmp_path: Path) -> None:
    config = json.loads(json.dumps(QWEN3_30B))
    *parents, last = path.split(".")
    place = config
    for name in parents:
        place = place[name]
    place[last] = value
    with pytest.raises(InvalidArgument, match=told):
        read_model(written(tmp_path / "wrong", config))


def test_a_voice_of_its_own_needs_an_omni_checkpoint(tmp_path: Path) -> None:
    plain = with_weights(written(tmp_path / "plain", {"model_type": "llama", "max_position_embeddings": 2048}))
    with pytest.raises(InvalidArgument, match="voice: 'checkpoint'.*null.*qwen3_omni_moe, qwen2_5_omni"):
        resolve_deployment(Deployment.parse({"checkpoint": str(plain), "voice": "checkpoint"}, "t"), tmp_path)


def test_what_is_not_served_is_refused_before_the_start(tmp_path: Path) -> None:
    other = with_weights(written(tmp_path / "other", {"model_type": "gpt2"}))
    with pytest.raises(InvalidArgument, match="model_type.*'gpt2'.*llama.*qwen3_omni_moe"):
        resolve_deployment(Deployment.parse({"checkpoint": str(other), "voice": None}, "t"), tmp_path)
    assert set(SERVED_MODEL_TYPES) == {*_PLAIN, *parts.PARTS}


def test_an_omni_checkpoint_is_resolved_by_its_thinker(tmp_path: Path) -> None:
    checkpoint = with_weights(written(tmp_path / "omni", QWEN3_30B))
    sizes = {"pool_tokens": 65536}
    data = {"checkpoint": str(checkpoint), "voice": "checkpoint", "prefill": sizes, "decode": sizes}
    found = resolve_deployment(Deployment.parse(data, "t"), tmp_path)
    assert found.voice == "checkpoint" and found.max_context == 65536
    assert found.talker.dtype in ("float32", "bfloat16")
    width = {"float32": 4, "bfloat16": 2}[found.talker.dtype]
    # Thinker: 48 layers, 4 heads of 128, hidden 2048; Talker: 20 layers, 2 heads of 128. Keys and values.
    pages = 2 * 65536 * 2 * 48 * 4 * 128 * width + 32768 * 2 * 20 * 2 * 128 * width
    assert required_shared_memory(found) == pages + 2 * 2048 * 8 * 2048 * width
