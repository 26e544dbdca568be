"""What e4m3 keys are without: a constant for each layer, head and channel."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tritone.errors import TritoneError
from tritone.kernels.torch_kernels import mixed_keys, mixed_queries, to_codes
from tritone.models.decoder.batch import Batch
from tritone.models.decoder.model import Decoder
from tritone.models.decoder.rope import rope_table

TEXT = Path(__file__).with_name("calibration.txt")
POSITIONS = 2048
"""The offset is the keys' mean over a context of so many tokens; slow channels turn little within it."""
_PAGE = 32
_FIRST = 4
"""The first tokens of a text have keys unlike all others."""


def key_offsets(decoder: Decoder, tokenizer: Tokenizer, scales: Tensor) -> Tensor:
    """Float32 [layers, kv_heads, head_dim]: the mean of the keys of a short text, as if it lay at every position, moved by
    less than a code, so that the text's first key becomes codes without error.

    Every token attends to the first one, whose key hardly depends on what token it is and is small; without the mean it is
    large, and its error would take back half of what the offsets gain. ``scales`` are those of the pages.
    Takes the time of a prompt of about 600 tokens. The same decoder gives the same bits, with the native kernels.
    Raises ``TritoneError`` naming the layer whose keys are not finite.
    """
    config = decoder.config
    ids = tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids[: len(decoder.rope.cos)]
    count, pages = len(ids), -(-len(ids) // _PAGE)
    kv = torch.zeros(pages, *config.page_shape(_PAGE), dtype=decoder.dtype, device=decoder.device)
    positions = torch.arange(count, dtype=torch.int32, device=decoder.device)
    table = torch.arange(pages, dtype=torch.int32, device=decoder.device)[None]
    lengths = torch.tensor([count], dtype=torch.int32, device=decoder.device)
    decoder.forward(Batch(torch.tensor(ids, device=decoder.device), positions, [0, count], lengths, table), kv)
    keys = kv[:, :, 0].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :count].float()
    # A pair of channels is a complex number, and its position a factor.
    rope = rope_table(config.rope_frequencies, config.rope_scaling, max(POSITIONS, count), decoder.device)
    turns = torch.complex(rope.cos, rope.sin)
    unturned = (torch.complex(*keys[:, :, _FIRST:].chunk(2, dim=-1)) / turns[_FIRST:count]).mean(2)
    mean = unturned * turns[:POSITIONS].mean(0)
    offsets = torch.cat((mean.real, mean.imag), dim=-1)
    finite = offsets.isfinite().all(2).all(1)
    if not bool(finite.all()):
        raise TritoneError(f"layer {int(finite.logical_not().nonzero()[0])}: keys of the calibration text are not finite")
    first, scale = mixed_keys(keys[:, :, 0] - offsets), scales[:, 0, :, None].to(decoder.device)
    return offsets + mixed_queries(first - to_codes(first, scale).float() * scale)
