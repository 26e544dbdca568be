"""Reads the layers of a decoder from its checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from torch import Tensor

from tritone.kernels import HeadNorm, Kernels
from tritone.models.decoder.config import DecoderConfig, Experts
from tritone.models.decoder.linear import DenseLinear, Linear
from tritone.models.decoder.mlp import DenseMlp, Mlp, SharedExpert, SparseMlp
from tritone.models.decoder.model import Layer
from tritone.models.decoder.weights import LinearReader


class LayerReader:
    """``linears`` reads matrices and ``read`` other tensors, by name; ``tensors`` has the names of the others.

    Activations are ``dtype``; routers are float32.
    """

    def __init__(
        self,
        config: DecoderConfig,
        kernels: Kernels,
        linears: LinearReader,
        read: Callable[[str, torch.dtype], Tensor],
        tensors: Container[str],
        dtype: torch.dtype,
    ) -> None:
        self._config = config
        self._kernels = kernels
        self._linears = linears
        self._read_as = read
        self._tensors = tensors
        self._dtype = dtype

    def layer(self, index: int) -> Layer:
        base = f"{self._config.part.model}.layers.{index}"
        norm = None
        if self._config.qk_norm:
            q, k = (self._read(f"{base}.self_attn.{name}_norm.weight") for name in "qk")
            norm = HeadNorm(q, k, self._config.rms_norm_eps)
        return Layer(
            input_norm=self._read(f"{base}.input_layernorm.weight"),
            qkv=self._linear(f"{base}.self_attn", "q_proj", "k_proj", "v_proj"),
            head_norm=norm,
            output=self._linear(f"{base}.self_attn", "o_proj"),
            mlp_norm=self._read(f"{base}.post_attention_layernorm.weight"),
            mlp=self._mlp(index, f"{base}.mlp"),
        )

    def _mlp(self, index: int, base: str) -> Mlp:
        experts = self._config.experts
        if experts is None or not self._config.is_sparse(index):
            return self._dense(base)
        stacked = f"{base}.experts.gate_up_proj" in self._tensors
        shared = None
        if experts.shared_size:
            gate = DenseLinear(self._kernels, self._read(f"{base}.shared_expert_gate.weight"))
            shared = SharedExpert(self._dense(f"{base}.shared_expert"), gate)
        return SparseMlp(
            router=DenseLinear(self._kernels, self._read_as(f"{base}.gate.weight", torch.float32)),
            experts=tuple(self._stacked(base) if stacked else self._separate(base, experts)),
            per_token=experts.per_token,
            normalized=experts.normalized,
            shared=shared,
        )

    def _separate(self, base: str, experts: Experts) -> list[DenseMlp]:
        return [self._dense(f"{base}.experts.{number}") for number in range(experts.count)]

    def _stacked(self, base: str) -> list[DenseMlp]:
        gate_up, down = (self._read(f"{base}.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        return [
            DenseMlp(
                self._kernels,
                self._linears.product({f"{base}.experts.gate_up_proj[{number}]": gate_up[number]}, None),
                self._linears.product({f"{base}.experts.down_proj[{number}]": down[number]}, None),
            )
            for number in range(len(gate_up))
        ]

    def _dense(self, base: str) -> DenseMlp:
        return DenseMlp(self._kernels, self._linear(base, "gate_proj", "up_proj"), self._linear(base, "down_proj"))

    def _linear(self, base: str, *names: str) -> Linear:
        biases = [f"{base}.{name}.bias" for name in names if f"{base}.{name}.bias" in self._tensors]
        bias = torch.cat([self._read(name) for name in biases]) if biases else None
        return self._linears.linear([f"{base}.{name}" for name in names], bias)

    def _read(self, name: str) -> Tensor:
        return self._read_as(name, self._dtype)
