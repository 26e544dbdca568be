"""What a Talker is given of each token that the thinker computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tritone.errors import bad
from tritone.models.decoder.batch import Media


@dataclass(frozen=True)
class Handed:
    """One row [hidden] for each token, made of a hidden state and the token's embedding.

    ``layer``: which state: n is the output of the n-th layer, before deepstack is added; the number of layers is the state
    after the final norm. ``summed`` (Qwen2.5-Omni): the row is state + embedding, at media the state alone. Otherwise
    (Qwen3-Omni) it is the state at media and the embedding elsewhere.
    """

    layer: int
    summed: bool


def handed_of(config: Any, layers: int) -> Handed | None:
    """From the ``transformers`` configuration of a whole omni checkpoint whose thinker has so many layers; None where it has
    no Talker. Raises ``InvalidArgument`` for a layer that the thinker does not have.
    """
    if not config.enable_audio_output:
        return None
    if config.model_type == "qwen2_5_omni":
        return Handed(layers, summed=True)
    layer = config.talker_config.accept_hidden_layer
    if not 0 < layer <= layers:
        raise bad("talker_config.accept_hidden_layer", layer, f"1 to the thinker's layers ({layers})")
    return Handed(layer, summed=False)


class HandedRows:
    """The rows of one step, taken while the layers run."""

    def __init__(self, handed: Handed, layers: int, embedded: Tensor, media: Media | None) -> None:
        """``embedded`` [T, hidden] are the inputs of the first of so many layers, media in their places."""
        self._handed = handed
        self._final = handed.layer == layers
        self._media = None if media is None else media.rows
        self._rows = embedded.clone()
        if handed.summed and self._media is not None:
            self._rows[self._media] = 0

    def after(self, layers: int, x: Tensor, residual: Tensor) -> None:
        """So many layers have run, and ``x + residual`` is the last one's output."""
        if layers != self._handed.layer or self._final:
            return
        if self._handed.summed:
            self._rows += x + residual
        elif self._media is not None:
            self._rows[self._media] = x[self._media] + residual[self._media]

    def finish(self, final: Tensor) -> Tensor:
        """The rows [T, hidden]; ``final`` is the state after the final norm."""
        if self._final and self._handed.summed:
            self._rows += final
        elif self._final and self._media is not None:
            self._rows[self._media] = final[self._media]
        return self._rows
