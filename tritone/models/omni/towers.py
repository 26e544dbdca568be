"""The audio and vision towers of transformers, loaded alone, and the prompt that they make for the thinker."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tritone.media.features import MediaFeatures
from tritone.models.decoder.checkpoint import Checkpoint, Progress
from tritone.models.omni.extractors import image_processor
from tritone.models.omni.families import read_config
from tritone.models.omni.prompt import MediaPrompt

AUDIO, VISION = "thinker.audio_tower.", "thinker.visual."
_CLASSES = {
    "qwen3_omni_moe": ("modeling_qwen3_omni_moe", "Qwen3OmniMoe"),
    "qwen2_5_omni": ("modeling_qwen2_5_omni", "Qwen2_5Omni"),
}
Ints = npt.NDArray[np.int32]


class Towers:
    """Computes the embeddings of one prompt's media, so that a prompt has the same bits whatever else is served.

    All audio of a prompt goes through its tower at once: Qwen3's pads its chunks to the longest, and its convolutions see that,
    so an audio of less than a second has other embeddings beside a longer one, in transformers too. Pictures go one by one.
    """

    def __init__(
        self,
        directory: str | Path,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        progress: Progress | None = None,
    ) -> None:
        """Reads only the towers' tensors, as ``dtype``; raises ``InvalidArgument`` naming the first one that is wrong."""
        directory, self._device = Path(directory), torch.device(device)
        config, family = read_config(directory)
        self._config = config.thinker_config
        self._images = image_processor(directory)
        module, prefix = _CLASSES[family.name]
        classes = importlib.import_module(f"transformers.models.{family.name}.{module}")
        self._positions = getattr(classes, f"{prefix}PreTrainedModelForConditionalGeneration")
        self._audio: Any = _empty(getattr(classes, f"{prefix}AudioEncoder"), self._config.audio_config, dtype)
        self._vision: Any = _empty(getattr(classes, f"{prefix}VisionEncoder"), self._config.vision_config, dtype)
        states = {AUDIO: self._audio.state_dict(), VISION: self._vision.state_dict()}
        shapes = {prefix + name: tuple(value.shape) for prefix, state in states.items() for name, value in state.items()}
        with Checkpoint(directory, shapes, {}, lambda name: not name.startswith((AUDIO, VISION)), progress) as checkpoint:
            for prefix, tower in ((AUDIO, self._audio), (VISION, self._vision)):
                for name in states[prefix]:
                    value = checkpoint.read(prefix + name, dtype)
                    tower.load_state_dict({name: value}, strict=False, assign=True)
                tower.requires_grad_(False).eval().to(self._device)

    @torch.inference_mode()
    def prompt(self, ids: Ints, media: MediaFeatures) -> MediaPrompt:
        """The embeddings, positions and, for images, deepstack additions of one prompt; tensors lie on the towers' device.

        ``ids`` int32 [T], expanded for exactly ``media`` (``OmniProcessor.expand``).
        """
        config = self._config
        audio = [self._of_audio(media.audio)] if media.audio else []
        grids = self._grids(media)
        pictures = [self._of_picture(image, grid) for image, grid in zip(media.images, grids, strict=True)]
        is_audio, is_image = ids == config.audio_token_id, ids == config.image_token_id
        places = np.flatnonzero(is_audio | is_image)
        hidden = config.text_config.hidden_size
        embeddings = torch.empty(len(places), hidden, dtype=self._audio.dtype, device=self._device)
        for mask, found in ((is_audio, audio), (is_image, [embedding for embedding, _ in pictures])):
            if found:
                embeddings[torch.from_numpy(mask[places]).to(self._device)] = torch.cat(found)
        levels = len(getattr(config.vision_config, "deepstack_visual_indexes", ()))
        deepstack = embeddings.new_empty(levels, 0, hidden)
        if pictures:
            deepstack = torch.cat([deep for _, deep in pictures], dim=1)
        positions, delta = self._rope_index(ids, media, grids)
        return MediaPrompt(
            ids,
            positions,
            delta,
            places.astype(np.int32),
            embeddings,
            np.flatnonzero(is_image).astype(np.int32),
            deepstack,
            bytes.fromhex(media.digest),
        )

    def _of_audio(self, mels: Sequence[npt.NDArray[np.float32]]) -> Tensor:
        """[embeddings, hidden] of all clips' spectrograms."""
        features = torch.from_numpy(np.concatenate(mels, axis=1)).to(self._device, self._audio.dtype)
        lengths = torch.tensor([mel.shape[1] for mel in mels], device=self._device)
        found: Tensor = self._audio(features, feature_lens=lengths).last_hidden_state
        return found

    def _of_picture(self, image: npt.NDArray[np.uint8], grid: Tensor) -> tuple[Tensor, Tensor]:
        """[embeddings, hidden] and deepstack [L, embeddings, hidden] of one picture of ``grid`` [3] patches."""
        patches = self._images(images=image, input_data_format="channels_last", do_resize=False, return_tensors="pt")
        pixels = patches["pixel_values"].to(self._device, self._vision.dtype)
        found = self._vision(pixels, grid_thw=grid[None].to(self._device))
        deep = getattr(found, "deepstack_features", None) or ()
        pooled: Tensor = found.pooler_output
        return pooled, torch.stack(list(deep)) if deep else pooled.new_empty(0, *pooled.shape)

    def _grids(self, media: MediaFeatures) -> Tensor:
        """int64 [images, 3]: patches in time, height, width."""
        side = self._config.vision_config.patch_size
        grids = [[1, image.shape[0] // side, image.shape[1] // side] for image in media.images]
        return torch.tensor(grids, dtype=torch.int64).reshape(-1, 3)

    def _rope_index(self, ids: Ints, media: MediaFeatures, grids: Tensor) -> tuple[Ints, int]:
        """``get_rope_index`` of transformers, which asks its model only for the configuration."""
        model = SimpleNamespace(config=self._config, spatial_merge_size=self._config.vision_config.spatial_merge_size)
        model.get_llm_pos_ids_for_vision = partial(self._positions.get_llm_pos_ids_for_vision, model)
        given = torch.from_numpy(ids.astype(np.int64))[None]
        positions, delta = self._positions.get_rope_index(
            model,
            given,
            grids if len(grids) else None,
            None,
            torch.ones_like(given),
            False,
            torch.tensor([mel.shape[1] for mel in media.audio]),
        )
        return positions[:, 0].to(torch.int32).numpy(), int(delta)


def _empty(cls: Any, config: Any, dtype: torch.dtype) -> Any:
    """A tower whose weights are not drawn, since they are read next."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        return cls._from_config(config, dtype=dtype)
