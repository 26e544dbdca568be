"""The kernels in plain torch: used where no C compiler is found, and as the other side of the native kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tritone.kernels.interface import (
    KV,
    HeadNorm,
    PackedWeight,
    QuantizedPages,
    RopeTable,
    check_pages,
    key_factor,
    mixed_width,
    same_offsets,
)

# Larger numbers are limited before they are mixed, so that infinities do not make NaN.
_MIX_MOST = 1e30


class TorchKernels:
    """``Kernels`` from torch operations; any device, any head size, one sequence after the other in attention."""

    name = "torch"

    def add_rms_norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x if residual is None else residual.add_(x)
        return rms_norm(total, weight, eps), total

    def rope_append(
        self,
        qkv: Tensor,
        positions: Tensor,
        slots: Tensor,
        rope: RopeTable,
        kv: KV,
        layer: int,
        norm: HeadNorm | None = None,
    ) -> None:
        pages, _, _, kv_heads, page_size, _ = kv.shape
        if positions.numel() == 0:
            return
        for name, index, limit in (("slots", slots, pages * page_size), ("positions", positions, rope.cos.shape[0])):
            if int(index.min()) < 0 or int(index.max()) >= limit:
                raise IndexError(f"{name}: a value is outside the {limit} allowed")
        heads = qkv.shape[1] - 2 * kv_heads
        q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
        if norm is not None:
            q.copy_(rms_norm(q, norm.q, norm.eps))
            k.copy_(rms_norm(k, norm.k, norm.eps))
        cos, sin = rope.cos[positions.long()].unsqueeze(1), rope.sin[positions.long()].unsqueeze(1)
        rotated = []
        for x in (q, k):
            a, b = x.float().chunk(2, dim=-1)
            rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
            x.copy_(rotated[-1])
        page, offset = slots // page_size, slots % page_size
        if isinstance(kv, QuantizedPages):
            q.copy_(mixed_queries(rotated[0]))
        for half, x in enumerate((k, v)):
            if isinstance(kv, QuantizedPages):
                # Torch indexes bytes, but not float8.
                if half == 0:
                    x = mixed_keys(x if kv.offsets is None else x.float() - kv.offsets[layer])
                codes = to_codes(x, kv.scales[layer, half, :, None])
                kv.codes.view(torch.uint8)[page, layer, half, :, offset] = codes.view(torch.uint8)
            else:
                kv[page, layer, half, :, offset] = x.to(kv.dtype)

    def paged_attention(
        self, q: Tensor, kv: KV, layer: int, page_table: Tensor, starts: Tensor, context_lens: Tensor, scale: float
    ) -> Tensor:
        pages, _, _, kv_heads, page_size, head_dim = kv.shape
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        bounds, lengths = starts.tolist(), context_lens.tolist()
        for s, length in enumerate(lengths):
            begin, end = bounds[s], bounds[s + 1]
            used = -(-length // page_size)
            ids = page_table[s, :used].long()
            if not 0 < end - begin <= length or used > page_table.shape[1]:
                raise IndexError(f"context_lens[{s}]: {length} does not fit its tokens or pages")
            if int(ids.min()) < 0 or int(ids.max()) >= pages:
                raise IndexError(f"page_table[{s}]: a page is outside the {pages} allowed")
            # [2, kv_heads, context, head_dim]
            held = _wide(kv, ids, layer).permute(1, 2, 0, 3, 4).reshape(2, kv_heads, used * page_size, head_dim)
            key, value = held[:, :, :length].unbind(0)
            rows = q[begin:end].float().mul(scale)
            query = rows.view(end - begin, kv_heads, -1, head_dim).permute(1, 2, 0, 3)  # [kv_heads, group, new, d]
            scores = query @ key.unsqueeze(1).transpose(-1, -2)
            if end - begin > 1:
                future = torch.ones(end - begin, length, dtype=torch.bool, device=q.device).triu(length - (end - begin) + 1)
                scores.masked_fill_(future, float("-inf"))
            mixed = scores.softmax(-1) @ value.unsqueeze(1)
            out[begin:end] = mixed.permute(2, 0, 1, 3).reshape(end - begin, -1, head_dim).to(q.dtype)
        return out

    def convert_pages(self, source: KV, blocks: Sequence[int], kv: KV, pages: Sequence[int], tokens: int) -> int | None:
        read, held = _elements(source), _elements(kv)
        check_pages(read, blocks, held, pages, tokens)
        size, nan = held.shape[4], None
        same, identical = same_offsets(source, kv), False
        if same and isinstance(source, QuantizedPages) and isinstance(kv, QuantizedPages):
            identical = torch.equal(source.scales, kv.scales)
        for index in range(-(-tokens // size)):
            rows = min(size, tokens - index * size)
            from_page, to_page = read[blocks[index], ..., :rows, :], held[pages[index], ..., :rows, :]
            if identical:
                to_page.view(torch.uint8).copy_(from_page.view(torch.uint8))
                continue
            values = _widened(from_page, source)
            if isinstance(source, QuantizedPages) and not same:
                values[:, 0] = mixed_queries(values[:, 0])  # which is also the way back
                if source.offsets is not None:
                    values[:, 0] += source.offsets[:, :, None]
            if isinstance(kv, QuantizedPages):
                if not same:
                    if kv.offsets is not None:
                        values[:, 0] -= kv.offsets[:, :, None]
                    values[:, 0] = mixed_keys(values[:, 0])
                if nan is None and bool(values.isnan().any()):
                    nan = index
                to_page.view(torch.uint8).copy_(to_codes(values, kv.scales[..., None, None]).view(torch.uint8))
            else:
                to_page.copy_(values)
        return nan

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def pack(self, weight: Tensor) -> PackedWeight:
        data = torch.ops.mkldnn._reorder_linear_weight(weight) if _takes_onednn(weight) else weight
        return PackedWeight(data, weight.shape[0], weight.shape[1], weight.dtype)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        if not weight.data.is_mkldnn:
            return functional.linear(x, weight.data, bias)
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, weight.out_features))
        # oneDNN sums a single row in another order than two or more, which agree among themselves.
        tall = x.repeat(2, 1) if rows == 1 else x
        y: Tensor = torch.ops.mkldnn._linear_pointwise(tall, weight.data, bias, "none", [], "")
        return y[:rows]


def to_codes(x: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn of ``x / scale``, to nearest, ties to even, saturating at +-448; NaN stays NaN."""
    return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def mixed_keys(x: Tensor) -> Tensor:
    """Float32 Hadamard transform over ``mixed_width`` neighbours of the last axis, times ``key_factor``."""
    return _mixed(x, key_factor(mixed_width(x.shape[-1])))


def mixed_queries(x: Tensor) -> Tensor:
    """The same with the factor of queries; undoes ``mixed_keys``."""
    width = mixed_width(x.shape[-1])
    return _mixed(x, 1.0 / (width * key_factor(width)))


def _mixed(x: Tensor, factor: float) -> Tensor:
    # Sums in the order of the native kernels: both give the same bits.
    width, shape, step = mixed_width(x.shape[-1]), x.shape, 1
    x = x.float().clamp(-_MIX_MOST, _MIX_MOST)
    while step < width:
        low, high = x.reshape(-1, 2, step).unbind(1)
        x = torch.stack((low + high, low - high), dim=1)
        step *= 2
    return x.reshape(shape) * factor


def _elements(kv: KV) -> Tensor:
    return kv.codes if isinstance(kv, QuantizedPages) else kv


def _widened(part: Tensor, kv: KV) -> Tensor:
    """Float32 numbers of pages, or rows of one, [..., layers, 2, kv_heads, rows, head_dim] of ``kv``."""
    wide = part.to(torch.float32, copy=True)
    return wide * kv.scales[..., None, None] if isinstance(kv, QuantizedPages) else wide


def _wide(kv: KV, ids: Tensor, layer: int) -> Tensor:
    """One layer of some pages, float32 [pages, 2, kv_heads, page_size, head_dim]."""
    if isinstance(kv, QuantizedPages):
        codes = kv.codes.view(torch.uint8)[ids, layer].view(torch.float8_e4m3fn)
        return codes.float() * kv.scales[layer, :, :, None, None]
    return kv[ids, layer].float()


def _takes_onednn(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, rounded to x's dtype and then multiplied by ``weight``."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
