"""The decoder itself: embedding, layers, final norm and head over paged KV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from tritone.kernels import KV, HeadNorm, Kernels, RopeTable
from tritone.models.decoder.batch import Batch, Deepstack
from tritone.models.decoder.config import DecoderConfig
from tritone.models.decoder.handed import HandedRows
from tritone.models.decoder.linear import Linear
from tritone.models.decoder.mlp import Mlp
from tritone.models.decoder.rope import rope_rows


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; ``qkv`` is fused in this order along its outputs."""

    input_norm: Tensor
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    mlp_norm: Tensor
    mlp: Mlp


class Decoder:
    """A decoder in evaluation; ``load_decoder`` makes one.

    Same weights, same tokens: the same bits, whatever else is in the batch and however a prompt is cut into chunks, with
    the native kernels.
    """

    def __init__(
        self,
        config: DecoderConfig,
        embedding: Tensor,
        layers: list[Layer],
        final_norm: Tensor,
        head: Linear,
        rope: RopeTable,
        kernels: Kernels,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.rope = rope
        self.kernels = kernels
        self.dtype = embedding.dtype
        self.device = embedding.device

    @torch.inference_mode()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [T, hidden] of token ids int64 [T]. Raises ``IndexError`` for an id outside the vocabulary."""
        return functional.embedding(tokens, self.embedding)

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KV, inputs: Tensor | None = None) -> Tensor:
        """Run the new tokens; gives their hidden states [T, hidden] after the final norm.

        ``kv`` [pages, layers, 2, kv_heads, page_size, head_dim] gets their keys and values. ``inputs`` [T, hidden]
        replaces the token embeddings. Raises ``IndexError`` for a token, position or page out of range.
        """
        kernels, eps, scale = self.kernels, self.config.rms_norm_eps, self.config.head_dim**-0.5
        tokens, heads, media = batch.tokens.shape[0], self.config.q_heads, batch.media
        slots = batch.slots(kv.shape[4])
        starts = torch.tensor(batch.query_starts, dtype=torch.int32, device=self.device)
        rope, positions = self._rotations(batch)
        x = self.embed(batch.tokens) if inputs is None else inputs.to(self.dtype, copy=True)
        deepstack = None
        if media is not None:
            x[media.rows] = media.embeddings.to(self.dtype)
            deepstack = media.deepstack
        taken = self._taken(batch, x)
        residual: Tensor | None = None
        for index, layer in enumerate(self.layers):
            x, residual = kernels.add_rms_norm(x, residual, layer.input_norm, eps)
            qkv = layer.qkv(x).view(tokens, -1, self.config.head_dim)
            kernels.rope_append(qkv, positions, slots, rope, kv, index, layer.head_norm)
            mixed = kernels.paged_attention(
                qkv[:, :heads], kv, index, batch.page_table, starts, batch.context_lens, scale
            ).view(tokens, -1)
            x, residual = kernels.add_rms_norm(layer.output(mixed), residual, layer.mlp_norm, eps)
            x = layer.mlp(x)
            if taken is not None:
                taken.after(index + 1, x, residual)
            if deepstack is not None and index < len(deepstack.layers):
                _add(deepstack, index, x, residual)
        final = kernels.add_rms_norm(x, residual, self.final_norm, eps)[0]
        if taken is not None:
            assert batch.handed is not None
            batch.handed.view(-1, batch.handed.shape[-1])[slots] = taken.finish(final)
        return final

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 [N, vocab] from rows [N, hidden] of ``forward``."""
        return self.head(hidden).float()

    def _rotations(self, batch: Batch) -> tuple[RopeTable, Tensor]:
        """The table of cosines and sines and each token's row in it."""
        if batch.rotary is None or self.config.rope_axes is None:
            return self.rope, batch.positions
        rows = torch.arange(len(batch.positions), dtype=torch.int32, device=self.device)
        return rope_rows(self.rope, self.config.rope_axes, batch.rotary), rows

    def _taken(self, batch: Batch, embedded: Tensor) -> HandedRows | None:
        if batch.handed is None:
            return None
        assert self.config.handed is not None
        return HandedRows(self.config.handed, self.config.layers, embedded, batch.media)


def _add(deepstack: Deepstack, layer: int, x: Tensor, residual: Tensor) -> None:
    """To the layer's output ``x + residual``, in place; their sum is rounded first, as between any two layers."""
    residual[deepstack.rows] += x[deepstack.rows]
    x[deepstack.rows] = deepstack.layers[layer].to(x.dtype)
