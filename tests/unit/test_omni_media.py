"""Media through processor and towers: what transformers makes of the same checkpoint, alone and beside other media."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from media_files import noise, pixels
from PIL import Image

from perf.omni.tiny import make_qwen3_omni, make_qwen25_omni
from tests.omni_processor import reference_processor
from tritone.errors import InvalidArgument
from tritone.media.audio import AudioClip
from tritone.media.features import MediaFeatures
from tritone.media.images import Picture
from tritone.models.omni.extractors import image_processor
from tritone.models.omni.processor import OmniProcessor
from tritone.models.omni.prompt import MediaPrompt
from tritone.models.omni.towers import Towers

RATE = 16_000
Content = list[Any]
"""Text, samples (1-dimensional) and pixels (3-dimensional), in order."""

PROMPTS: dict[str, Content] = {
    "audio": ["Describe ", noise(12_345)],
    "shortest audio": [noise(1600), "?"],
    "whole hops": [noise(16_000)],
    "long audio": [noise(16_000 * 37 + 77), "one two"],
    "audio of one length": [noise(8000, 1), noise(8000, 2)],
    "audio of several lengths": [noise(1601), "and", noise(32_123), noise(31_999), "and", noise(9000)],
    "a last window that meets the longest": [noise(16_100), noise(16_000)],
    "image": ["Describe ", pixels(100, 50)],
    "smallest image": [pixels(1, 1)],
    "images of several sizes": [pixels(64, 64), "and", pixels(333, 90), pixels(40, 300), "?"],
    "audio and image": ["Describe ", noise(20_000), pixels(70, 130), "please"],
    "several of both": [
        pixels(56, 56), noise(5000), "and", noise(40_000), pixels(200, 100), "one", noise(4321), pixels(30, 30)
    ],
}


class Checkpoint(NamedTuple):
    directory: Path
    model: Any
    reference: Any
    processor: OmniProcessor
    towers: Towers


@functools.cache
def checkpoint(family: str, root: Path) -> Checkpoint:
    directory = root / family
    make, cls = {
        "qwen3": (make_qwen3_omni, transformers.Qwen3OmniMoeProcessor),
        "qwen2.5": (make_qwen25_omni, transformers.Qwen2_5OmniProcessor),
    }[family]
    model = make(directory)
    reference = reference_processor(cls, directory)
    return Checkpoint(directory, model, reference, OmniProcessor(directory), Towers(directory, torch.float32))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("omni")


@pytest.fixture(params=["qwen3", "qwen2.5"])
def made(request: pytest.FixtureRequest, root: Path) -> Checkpoint:
    return checkpoint(request.param, root)


def medium(value: np.ndarray[Any, Any]) -> AudioClip | Picture:
    return AudioClip(value, RATE) if value.ndim == 1 else Picture(value)


def messages(content: Content) -> list[dict[str, Any]]:
    kinds = {1: "audio", 3: "image"}
    parts = [{"type": "text", "text": c} if isinstance(c, str) else {"type": kinds[c.ndim]} for c in content]
    return [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": parts}]


def prepare(made: Checkpoint, content: Content) -> tuple[Any, MediaFeatures]:
    media = [medium(value) for value in content if not isinstance(value, str)]
    encoded: Any = made.processor.tokenizer.apply_chat_template(
        messages(content), add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return made.processor.expand(encoded["input_ids"], media), made.processor.features(media)


def prompt(made: Checkpoint, content: Content) -> MediaPrompt:
    expanded, features = prepare(made, content)
    return made.towers.prompt(expanded.ids, features)


def reference(made: Checkpoint, content: Content) -> Any:
    audio = [c for c in content if not isinstance(c, str) and c.ndim == 1]
    images = [Image.fromarray(c) for c in content if not isinstance(c, str) and c.ndim == 3]
    text = made.reference.apply_chat_template(messages(content), add_generation_prompt=True, tokenize=False)
    return made.reference(text=text, audio=audio or None, images=images or None, return_tensors="pt")


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_and_features_are_those_of_transformers(name: str, made: Checkpoint) -> None:
    content = PROMPTS[name]
    expanded, features = prepare(made, content)
    expected = reference(made, content)
    assert expanded.ids.tolist() == expected["input_ids"][0].tolist()
    thinker = made.model.config.thinker_config
    assert expanded.audio_tokens == (expanded.ids == thinker.audio_token_id).sum()
    assert expanded.image_tokens == (expanded.ids == thinker.image_token_id).sum()
    mask = expected.get("feature_attention_mask")
    assert [mel.shape[1] for mel in features.audio] == (mask.sum(-1).tolist() if mask is not None else [])
    for row, mel in enumerate(features.audio):
        wanted = expected["input_features"][row, :, : mel.shape[1]]
        torch.testing.assert_close(torch.tensor(mel), wanted, rtol=0, atol=2e-5)
    at, patches_of = 0, image_processor(made.directory)
    for image in features.images:
        patches = patches_of(images=image, input_data_format="channels_last", do_resize=False)["pixel_values"]
        assert np.array_equal(patches, expected["pixel_values"][at : at + len(patches)])
        at += len(patches)
    assert at == (len(expected["pixel_values"]) if "pixel_values" in expected else 0)


@pytest.mark.parametrize("name", PROMPTS)
@torch.inference_mode()
def test_towers_and_positions_are_those_of_transformers(name: str, made: Checkpoint) -> None:
    content = PROMPTS[name]
    found, expected, thinker = prompt(made, content), reference(made, content), made.model.thinker
    ids = expected["input_ids"][0]
    is_audio, is_image = ids == thinker.config.audio_token_id, ids == thinker.config.image_token_id
    assert found.places.tolist() == torch.argwhere(is_audio | is_image).flatten().tolist()
    assert found.visual.tolist() == torch.argwhere(is_image).flatten().tolist()
    wanted = torch.zeros(len(ids), found.embeddings.shape[1])
    lengths = None
    if is_audio.any():
        lengths = expected["feature_attention_mask"].sum(-1)
        audio = thinker.get_audio_features(expected["input_features"], expected["feature_attention_mask"])
        wanted[is_audio] = audio.last_hidden_state
    if is_image.any():
        images = thinker.get_image_features(expected["pixel_values"], expected["image_grid_thw"])
        wanted[is_image] = torch.cat(list(images.pooler_output))
        deep = getattr(images, "deepstack_features", None) or ()
        assert found.deepstack.shape[0] == len(deep)
        for level, rows in enumerate(deep):
            torch.testing.assert_close(found.deepstack[level], torch.cat(list(rows)), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.embeddings, wanted[is_audio | is_image], rtol=1e-4, atol=1e-4)
    positions, delta = thinker.get_rope_index(
        expected["input_ids"], expected.get("image_grid_thw"), None, expected["attention_mask"], False, lengths
    )
    assert found.positions.tolist() == positions[:, 0].tolist()
    assert found.delta == int(delta)
    assert (found.ids.dtype, found.positions.dtype, found.places.dtype, found.visual.dtype) == (np.int32,) * 4


def test_text_alone_has_plain_positions(made: Checkpoint) -> None:
    found = prompt(made, ["Hello, how are you today?"])
    count = len(found.ids)
    assert found.positions.tolist() == [list(range(count))] * 3 and found.delta == 0
    assert found.embeddings.shape == (0, 128) and found.deepstack.shape[1:] == (0, 128)
    assert found.places.shape == found.visual.shape == (0,)


def test_a_picture_has_the_same_bits_beside_other_media(made: Checkpoint) -> None:
    content = PROMPTS["several of both"]
    several = prompt(made, content)
    expanded, _ = prepare(made, content)
    rows = several.embeddings[torch.isin(torch.tensor(several.places), torch.tensor(several.visual))]
    alone = [prompt(made, [value]) for value in content if not isinstance(value, str) and value.ndim == 3]
    assert torch.equal(rows, torch.cat([each.embeddings for each in alone]))
    assert torch.equal(several.deepstack, torch.cat([each.deepstack for each in alone], dim=1))
    assert (len(several.places), len(rows)) == (expanded.audio_tokens + expanded.image_tokens, expanded.image_tokens)


@pytest.mark.parametrize("family", ["qwen3", "qwen2.5"])
def test_in_bfloat16_the_towers_are_those_that_transformers_loads(family: str, root: Path) -> None:
    made = checkpoint(family, root)
    found = Towers(made.directory, torch.bfloat16)
    model = type(made.model).from_pretrained(made.directory, dtype=torch.bfloat16)
    content: Content = [noise(30_000), pixels(120, 90)]
    expanded, features = prepare(made, content)
    result, given = found.prompt(expanded.ids, features), reference(made, content)
    audio = model.thinker.get_audio_features(given["input_features"].bfloat16(), given["feature_attention_mask"])
    images = model.thinker.get_image_features(given["pixel_values"].bfloat16(), given["image_grid_thw"])
    count = expanded.audio_tokens
    assert result.embeddings.dtype == torch.bfloat16
    torch.testing.assert_close(result.embeddings[:count], audio.last_hidden_state)
    torch.testing.assert_close(result.embeddings[count:], torch.cat(list(images.pooler_output)))


def test_media_that_differ_have_other_digests(made: Checkpoint) -> None:
    image, clip = pixels(64, 64), noise(5000)
    other_image, other_clip = image.copy(), clip.copy()
    other_image[0, 0, 0] ^= 64
    other_clip[2500] += 0.01
    contents: list[Content] = [[image], [other_image], [image, image], [clip, image]]
    contents += [[clip], [other_clip], [clip, clip], [clip[:-160]]]
    digests = {prompt(made, content).digest for content in contents}
    assert len(digests) == len(contents)
    assert prompt(made, ["other text", clip, image]).digest == prompt(made, [clip, image]).digest


@pytest.mark.parametrize("spelt", ["<audio>", "<image>", "<video>"])
def test_text_must_not_spell_placeholders(spelt: str, made: Checkpoint) -> None:
    config, tokenizer = made.model.config.thinker_config, made.processor.tokenizer
    token = {"<audio>": config.audio_token_id, "<image>": config.image_token_id, "<video>": config.video_token_id}[spelt]
    name = tokenizer.convert_ids_to_tokens(token)
    with pytest.raises(InvalidArgument) as caught:
        prepare(made, [f"hear {name}", noise(3000), pixels(64, 64)])
    count = 2 if spelt != "<video>" else 1
    assert caught.value.message.startswith(f"messages: the prompt holds {name} {count} times; allowed: {count - 1} times")


def test_a_checkpoint_that_lacks_a_towers_tensor_is_refused_by_its_name(made: Checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in made.directory.iterdir():
        if file.suffix in (".json", ".jinja"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(made.directory / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.startswith("thinker.visual."))
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InvalidArgument, match=f"tensor {name}: 'missing' is not allowed"):
        Towers(tmp_path, torch.float32)


def test_published_checkpoints_keep_both_parts_in_one_file(made: Checkpoint, tmp_path: Path) -> None:
    import json

    for file in made.directory.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "processor_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(InvalidArgument, match="preprocessor_config.json"):
        OmniProcessor(tmp_path)
    parts = json.loads((made.directory / "processor_config.json").read_text())
    merged = parts["feature_extractor"] | parts["image_processor"] | {"processor_class": parts["processor_class"]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(merged))
    media = [medium(noise(5000)), medium(pixels(90, 60))]
    assert OmniProcessor(tmp_path).features(media).digest == made.processor.features(media).digest
