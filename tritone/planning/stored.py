"""What a quantised checkpoint stores its matrices as, by the scheme that its ``config.json`` declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tritone.errors import bad
from tritone.planning.tensors import SCALE_BYTES, Precision, Tensors

Stored = Callable[[Tensors], Precision | None]


def stored_precisions(config: Mapping[str, Any], dense: str) -> Stored | None:
    """For each matrix its precision, None for one that is stored dense; None where the whole checkpoint is.

    Scales are counted as those of weights that are made here; so a file that stores them in 16 bits takes a little less."""
    if not (config.get("quantization_config") or config.get("compression_config")):
        return None
    # Only here: it needs torch.
    from quantization.checkpoints import detect
    from quantization.errors import QuantizationError

    try:
        scheme = detect(config)
    except QuantizationError as error:
        raise bad("config.json: quantization_config", str(error), "what tritone loads") from None

    def of(tensors: Tensors) -> Precision | None:
        storage = scheme.storage_of(tensors.name) if tensors.quantisable else None
        if storage is None:
            return None
        if storage.weights not in SCALE_BYTES:
            raise bad("config.json: quantization_config", storage.weights, ", ".join(SCALE_BYTES))
        return Precision(storage.weights, dense, storage.group, zeros=not storage.symmetric)

    return of
