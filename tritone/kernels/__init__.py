"""The engine's kernels: ``default_kernels()`` gives the native ones, or the torch ones where they cannot be built."""

from __future__ import annotations

import logging
import os
from functools import lru_cache

from tritone.compiler import BuildError
from tritone.errors import bad
from tritone.kernels.build import build_library
from tritone.kernels.interface import KV, HeadNorm, Kernels, PackedWeight, QuantizedPages, RopeTable
from tritone.kernels.native import NativeKernels
from tritone.kernels.torch_kernels import TorchKernels

__all__ = [
    "KV",
    "HeadNorm",
    "Kernels",
    "NativeKernels",
    "PackedWeight",
    "QuantizedPages",
    "RopeTable",
    "TorchKernels",
    "default_kernels",
]


@lru_cache(maxsize=1)
def default_kernels() -> Kernels:
    """The kernels for CPU tensors in this process, chosen once.

    ``$TRITONE_KERNELS`` is ``auto`` (default), ``native`` (a failed build raises ``BuildError``) or ``torch``.
    """
    choice = os.environ.get("TRITONE_KERNELS", "auto")
    if choice not in ("auto", "native", "torch"):
        raise bad("TRITONE_KERNELS", choice, "auto, native, torch")
    if choice == "torch":
        return TorchKernels()
    try:
        return NativeKernels(build_library())
    except (BuildError, OSError) as error:
        if choice == "native":
            raise
        logging.getLogger(__name__).warning("native kernels are off, decoding will be several times slower: %s", error)
        return TorchKernels()
