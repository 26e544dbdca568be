"""Names to directories, and the demo checkpoint made out of its package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tritone.cache import default_cache, made_whole
from tritone.checkpoints import DEMO_CHECKPOINT, is_prepared, resolve_checkpoint, resolve_voice, smollm2
from tritone.checkpoints.safetensors_writer import to_bfloat16, write_bfloat16
from tritone.errors import TritoneError
from tritone.models.talker.config import is_talker


def test_bfloat16_rounds_to_nearest_even() -> None:
    import torch

    generator = np.random.default_rng(0)
    values = (generator.standard_normal(100_000) * 10.0 ** generator.integers(-30, 30, 100_000)).astype(np.float32)
    ties = (np.arange(0x3F80_0000, 0x3F90_0000, 0x8000, dtype=np.uint32)).view(np.float32)
    for array in (values, ties, -ties, np.zeros(2, np.float32)):
        expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        assert np.array_equal(to_bfloat16(array), expected)


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {"a.weight": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.full((5,), -0.5, np.float32)}
    write_bfloat16(tmp_path / "x", [(name, value.shape) for name, value in tensors.items()], iter(tensors.values()))
    loaded = load_file(tmp_path / "x")
    assert {name: str(value.dtype) for name, value in loaded.items()} == dict.fromkeys(tensors, "torch.bfloat16")
    assert all(np.array_equal(loaded[name].float().numpy(), value) for name, value in tensors.items())


def test_a_shape_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a: shape \(2,\), expected \(3,\)"):
        write_bfloat16(tmp_path / "x", [("a", (3,))], [np.zeros(2, np.float32)])


def test_rows_come_back_into_hugging_faces_order() -> None:
    heads, width, columns = 3, 8, 2
    original = np.arange(heads * width * columns, dtype=np.float32).reshape(heads * width, columns)
    # What GGUF's converter does to a Hugging Face weight.
    stored = original.reshape(heads, 2, width // 2, columns).swapaxes(1, 2).reshape(original.shape)
    assert not np.array_equal(stored, original)
    assert np.array_equal(smollm2.unpermute(stored, heads), original)


def test_half_made_directories_are_never_seen(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with pytest.raises(RuntimeError), made_whole(target) as work:
        assert work is not None
        (work / "half").write_text("")
        raise RuntimeError
    assert not target.exists() and [path.name for path in tmp_path.iterdir()] == [".target.lock"]
    (tmp_path / ".target.new-killed").mkdir()
    with made_whole(target) as work:
        assert work is not None and not (tmp_path / ".target.new-killed").exists()
        (work / "whole").write_text("")
    assert (target / "whole").is_file()
    with made_whole(target) as work:
        assert work is None


@pytest.fixture(scope="module")
def demo() -> Path:
    """Made once for the checkout, as a start would."""
    return resolve_checkpoint(DEMO_CHECKPOINT, default_cache())


def test_the_demo_checkpoint_is_the_packages_model(demo: Path) -> None:
    from gguf import GGUFReader, dequantize
    from safetensors import safe_open

    assert is_prepared(DEMO_CHECKPOINT, default_cache())
    steps: list[str] = []
    reader = GGUFReader(smollm2._find_gguf(lambda line, done=0, total=0: steps.append(line)))
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with safe_open(demo / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) == len(stored) == 272
        names = {
            "token_embd.weight": ("model.embed_tokens.weight", 0),
            "blk.7.attn_q.weight": ("model.layers.7.self_attn.q_proj.weight", 9),
            "blk.7.attn_k.weight": ("model.layers.7.self_attn.k_proj.weight", 3),
            "blk.29.ffn_down.weight": ("model.layers.29.mlp.down_proj.weight", 0),
            "output_norm.weight": ("model.norm.weight", 0),
        }
        for name, (ours, heads) in names.items():
            expected = dequantize(stored[name].data, stored[name].tensor_type)
            expected = smollm2.unpermute(expected, heads) if heads else expected
            found = file.get_tensor(ours).float().numpy()
            assert found.shape == expected.shape
            assert np.all(np.abs(found - expected) <= np.abs(expected) * 2.0**-8)


def test_the_demo_checkpoint_computes(demo: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    tokenizer: Any = AutoTokenizer.from_pretrained(demo)
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", "<|im_start|>")
    model: Any = AutoModelForCausalLM.from_pretrained(demo, dtype=torch.bfloat16)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    assert prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    answer = model.generate(ids, max_new_tokens=20, do_sample=False)[0][ids.shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"


def test_the_demo_tokenizer(demo: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 49152
    for text in ("naïve café 😀👍🏽 日本語", "  two\n\ttabs ", "3.14 in 2024"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("12345").tokens == list("12345"), "digits one by one, as the model was trained"
    assert tokenizer.encode("a<|im_end|>").ids[-1] == 2
    assert tokenizer.decode([2], skip_special_tokens=True) == ""


def test_another_release_of_the_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / smollm2.FILE).write_bytes(b"GGUF")
    monkeypatch.setattr(smollm2, "package_directory", lambda name: tmp_path / "package")
    with pytest.raises(TritoneError, match="has sha256 .*allowed: b179c952"):
        resolve_checkpoint(DEMO_CHECKPOINT, tmp_path / "cache")
    monkeypatch.setattr(smollm2, "package_directory", lambda name: None)
    with pytest.raises(TritoneError, match="requirements/nodeps.txt"):
        resolve_checkpoint(DEMO_CHECKPOINT, tmp_path / "cache")
    assert not is_prepared(DEMO_CHECKPOINT, tmp_path / "cache")


def test_a_directory_must_be_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TritoneError, match=r"lacks tokenizer.json \(or vocab.json and merges.txt\), \*.safetensors"):
        resolve_checkpoint(str(tmp_path), tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert resolve_checkpoint(str(tmp_path), tmp_path) == tmp_path


@pytest.mark.parametrize("name", ["demo:other", "/no/such/directory", "a b", ""])
def test_names_that_mean_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(TritoneError, match=f"checkpoint: '{name}' is not allowed; allowed: .*demo:smollm2-135m-instruct"):
        resolve_checkpoint(name, tmp_path)


def test_a_hub_name_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(name: str, **options: Any) -> str:
        assert options["allow_patterns"]
        raise OSError("Name or service not known")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(TritoneError, match=r"checkpoint Qwen/Qwen2.5-0.5B could not .*--checkpoint /path/to/Qwen2.5-0.5B"):
        resolve_checkpoint("Qwen/Qwen2.5-0.5B", tmp_path)


def test_the_trained_talker_comes_along(tmp_path: Path) -> None:
    found = resolve_voice("demo:heart", tmp_path)
    assert is_talker(found) and (found / "talker" / "model.safetensors").is_file() and not any(tmp_path.iterdir())
    assert not is_prepared("demo:heart", tmp_path), "its VoiceBox is the other voice's"


def test_a_voice_directory(tmp_path: Path) -> None:
    with pytest.raises(TritoneError, match=r"voice: .*voice\.json, demo:hibari, or demo:heart"):
        resolve_voice(str(tmp_path), tmp_path)
    (tmp_path / "voice.json").write_text("{}")
    assert resolve_voice(str(tmp_path), tmp_path) == tmp_path
