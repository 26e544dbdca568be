"""4-bit codes in the layouts of the checkpoint formats.

Codes are uint8, 0 to 15. A word is an int32 of eight codes; code j of a word lies in bits 4 * j to 4 * j + 3, so that the
eighth reaches the sign bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quantization.errors import bad

IN_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)
# AutoAWQ's gemm layout: bits 4 * j of a word hold column AWQ_ORDER[j] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(codes: Tensor, dim: int, order: tuple[int, ...] = IN_ORDER, pad: bool = False) -> Tensor:
    """Eight codes along ``dim`` become one int32. A length that is no multiple of 8 is refused, or padded with zeros."""
    moved = codes.movedim(dim, -1)
    missing = -moved.shape[-1] % 8
    if missing and not pad:
        raise bad("length of packed dimension", moved.shape[-1], "a multiple of 8")
    words = torch.nn.functional.pad(moved, (0, missing))
    words = words.reshape(*words.shape[:-1], -1, 8)
    packed = torch.zeros(words.shape[:-1], dtype=torch.int32, device=codes.device)
    for place, source in enumerate(order):
        packed |= words[..., source].to(torch.int32) << (4 * place)
    return packed.movedim(-1, dim).contiguous()


def unpack_words(packed: Tensor, dim: int, length: int, order: tuple[int, ...] = IN_ORDER) -> Tensor:
    """Inverse of ``pack_words``: uint8 with ``length`` codes along ``dim``."""
    if packed.dtype != torch.int32:
        raise bad("dtype of packed codes", packed.dtype, "torch.int32")
    moved = packed.movedim(dim, -1)
    if moved.shape[-1] != -(-length // 8):
        raise bad("packed words", moved.shape[-1], f"{-(-length // 8)} for {length} codes")
    codes = torch.empty(*moved.shape, 8, dtype=torch.uint8, device=packed.device)
    for place, source in enumerate(order):
        codes[..., source] = (moved >> (4 * place)) & 15
    return codes.flatten(-2)[..., :length].movedim(-1, dim).contiguous()


def pack_pairs(codes: Tensor) -> Tensor:
    """Uint8 [..., K] to uint8 [..., K / 2]: an even column in the low half of its byte, the next one in the high half."""
    if codes.shape[-1] % 2:
        raise bad("length of packed dimension", codes.shape[-1], "a multiple of 2")
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_pairs(packed: Tensor) -> Tensor:
    """Inverse of ``pack_pairs``."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def pack_compressed(codes: Tensor, dim: int = 1) -> Tensor:
    """compressed-tensors "pack-quantized": weights [N, K] along K; zeros [N, G] along N (``dim`` 0)."""
    return pack_words(codes, dim, pad=True)


def unpack_compressed(packed: Tensor, length: int, dim: int = 1) -> Tensor:
    """Inverse of ``pack_compressed``; ``length`` is K (or N for zeros)."""
    return unpack_words(packed, dim, length)


def pack_gptq(codes: Tensor) -> Tensor:
    """Codes [N, K] to GPTQ's ``qweight`` int32 [K / 8, N]."""
    return pack_words(codes.t(), 0)


def unpack_gptq(qweight: Tensor) -> Tensor:
    """GPTQ's ``qweight`` int32 [K / 8, N] to codes [N, K]."""
    return unpack_words(qweight, 0, 8 * qweight.shape[0]).t().contiguous()


def pack_gptq_zeros(zeros: Tensor, version: int = 1) -> Tensor:
    """Zeros [N, G] to ``qzeros`` int32 [G, N / 8]. Version 1 stores (zero - 1) modulo 16, version 2 the zero."""
    return pack_words((zeros.t() - 1) & 15 if version == 1 else zeros.t(), 1)


def unpack_gptq_zeros(qzeros: Tensor, version: int = 1) -> Tensor:
    """``qzeros`` int32 [G, N / 8] to zeros [N, G]; a stored 15 of version 1 is the zero 0, there is no 16."""
    stored = unpack_words(qzeros, 1, 8 * qzeros.shape[1])
    return ((stored + 1) & 15 if version == 1 else stored).t().contiguous()


def pack_awq(codes: Tensor) -> Tensor:
    """Codes [N, K] to AWQ's ``qweight`` int32 [K, N / 8]; zeros [N, G] to ``qzeros`` [G, N / 8]."""
    return pack_words(codes.t(), 1, AWQ_ORDER)


def unpack_awq(packed: Tensor) -> Tensor:
    """Inverse of ``pack_awq``."""
    return unpack_words(packed, 1, 8 * packed.shape[1], AWQ_ORDER).t().contiguous()


def pack_bytes(codes: Tensor) -> Tensor:
    """compressed-tensors "pack-quantized" with 8 bits: int8 [N, K] to int32 [N, ceil(K / 4)], each code plus 128."""
    padded = torch.nn.functional.pad((codes.view(torch.uint8) ^ 128), (0, -codes.shape[1] % 4))
    return padded.contiguous().view(torch.int32)


def unpack_bytes(packed: Tensor, length: int) -> Tensor:
    """Inverse of ``pack_bytes``: int8 [N, length]."""
    if packed.dtype != torch.int32 or packed.shape[1] != -(-length // 4):
        raise bad("packed words", f"{packed.dtype} {list(packed.shape)}", f"torch.int32 [N, {-(-length // 4)}]")
    return (packed.contiguous().view(torch.uint8)[:, :length] ^ 128).contiguous().view(torch.int8)
