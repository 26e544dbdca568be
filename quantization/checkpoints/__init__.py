"""Checkpoint formats: which layers are stored how, reading them, and writing compressed-tensors."""

from quantization.checkpoints.detect import detect
from quantization.checkpoints.read import is_auxiliary, is_quantized, linear_tensors, read_kv_scales, read_linear, shape_fits
from quantization.checkpoints.scheme import Scheme, Storage
from quantization.checkpoints.store import quantization_config, store_linear

__all__ = [
    "Scheme",
    "Storage",
    "detect",
    "is_auxiliary",
    "is_quantized",
    "linear_tensors",
    "quantization_config",
    "read_kv_scales",
    "read_linear",
    "shape_fits",
    "store_linear",
]
