"""What the reference says about each token that is scored.

Its distributions would take vocabulary * 4 bytes a token. Kept are the hidden states that they come from, which take
hidden * 4; the head makes logits of them again, the same to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from quantization.files import TensorFiles, write_shard
from tritone.kernels import default_kernels
from tritone.models.decoder import DecoderConfig, DenseLinear


class Reference:
    """Hidden states of tasks in ``directory``, and the head of ``checkpoint``, dense, in float32.

    ``keys`` has for each task what its hidden states are known by: those of other keys are not taken.
    """

    def __init__(self, checkpoint: Path, directory: Path, keys: Mapping[str, str]) -> None:
        self._checkpoint = checkpoint
        self._directory = directory
        self._keys = keys
        self._head: DenseLinear | None = None
        self._files: dict[str, TensorFiles] = {}

    def keep(self, name: str, rows: list[Tensor]) -> None:
        """Hidden states [tokens, hidden] of each document of a task."""
        self._files.pop(name, None)
        self._directory.mkdir(parents=True, exist_ok=True)
        for old in self._directory.glob(f"{name}.*.safetensors"):
            old.unlink()
        write_shard(self._path(name), {str(index): row.contiguous() for index, row in enumerate(rows)})

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def rows(self, name: str, index: int) -> Tensor:
        """Hidden states of one document."""
        if name not in self._files:
            self._files[name] = TensorFiles([self._path(name)])
        return self._files[name].read(str(index))

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Float32 [tokens, vocabulary] of hidden states."""
        if self._head is None:
            tied = DecoderConfig.from_directory(self._checkpoint).tied_embeddings
            with TensorFiles.of(self._checkpoint) as files:
                weight = files.read("model.embed_tokens.weight" if tied else "lm_head.weight")
            self._head = DenseLinear(default_kernels(), weight.float())
        return self._head(rows)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name}.{self._keys[name]}.safetensors"
