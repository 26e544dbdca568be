"""Cuts hibari's ONNX graph in two: the half before the decoder as a graph, the decoder as plain weights."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import onnx
from onnx import numpy_helper

from tritone.models.voice.frames import Float32Array

# The weight that marks the cut; the names of nodes and of tensors between them are accidents of the export.
DECODER_ENTRY = "m.dec_in.weight"


class GraphError(ValueError):
    """The graph has not the structure this program knows."""


class HibariGraph:
    """Looks things up in one parsed hibari.onnx. Raises GraphError for a graph of another structure."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._initializers = {t.name: t for t in model.graph.initializer}
        self._producer = {name: node for node in model.graph.node for name in node.output}

    def front(self) -> onnx.ModelProto:
        """The sub-graph ids int64 [1, L], speed float32 [1] -> features float32 [1, W, F], f0 float32 [1, F]
        (Hz)."""
        entry = self._only_user(DECODER_ENTRY, "Conv").input[0]
        wanted = self._ancestors([entry, "f0"])
        nodes = [n for n in self._model.graph.node if any(o in wanted for o in n.output)]
        used = {i for n in nodes for i in n.input}
        nodes.append(onnx.helper.make_node("Identity", [entry], ["features"]))
        float32 = onnx.TensorProto.FLOAT
        graph = onnx.helper.make_graph(
            nodes,
            "hibari_front",
            list(self._model.graph.input),
            [
                onnx.helper.make_tensor_value_info("features", float32, [1, self.feature_width(), "frames"]),
                onnx.helper.make_tensor_value_info("f0", float32, [1, "frames"]),
            ],
            [t for name, t in self._initializers.items() if name in used],
        )
        front = onnx.helper.make_model(graph, opset_imports=list(self._model.opset_import))
        front.ir_version = self._model.ir_version
        onnx.checker.check_model(front)
        return front

    def feature_width(self) -> int:
        """W, the decoder's input channels."""
        return int(self._tensor(DECODER_ENTRY).shape[1])

    def decoder_blocks(self) -> int:
        """The number of ConvNeXt blocks."""
        return sum(name.startswith("m.dec.") and name.endswith(".gamma") for name in self._initializers)

    def layer_norm_epsilon(self) -> float:
        """The one epsilon of all the decoder's layer norms."""
        names = [f"m.dec.{i}.norm.weight" for i in range(self.decoder_blocks())] + ["m.dec_norm.weight"]
        found = {
            attribute.f
            for name in names
            for attribute in self._only_user(name, "LayerNormalization").attribute
            if attribute.name == "epsilon"
        }
        if len(found) != 1:
            raise GraphError(f"the decoder's layer norms have epsilons {sorted(found)}, one was expected")
        return float(np.float32(found.pop()))

    def decoder(self) -> dict[str, Float32Array]:
        """The decoder's weights in float32, in torch's layouts: convolutions [out, in/groups, taps], linears
        [out, in].

        dec_in.{weight,bias}; dec.i.{dw.weight, dw.bias, norm.weight, norm.bias, pw1.weight, pw1.bias,
        pw2.weight, pw2.bias, gamma}; dec_norm.{weight,bias}; head.{weight,bias}.
        """
        weights: dict[str, Float32Array] = {}
        for name in self._initializers:
            if name.startswith(("m.dec_in.", "m.dec.", "m.dec_norm.", "m.head.")):
                weights[name.removeprefix("m.")] = self._tensor(name).astype(np.float32)
        linears = [f"dec.{i}.{part}" for i in range(self.decoder_blocks()) for part in ("pw1", "pw2")] + ["head"]
        for linear in linears:
            weights[f"{linear}.weight"] = self._dequantised(f"m.{linear}.bias")
        return weights

    def _dequantised(self, bias: str) -> Float32Array:
        """The weight of the quantised linear layer with this bias: (q - zero) * scale, transposed to [out,
        in].

        In the graph: Add(bias, Mul(Cast(MatMulInteger(a, q, a_zero, zero)), Mul(a_scale, scale))).
        """
        add = self._only_user(bias, "Add")
        scaling = self._made_by(next(i for i in add.input if i != bias), "Mul")
        integer = self._made_by(self._made_by(scaling.input[0], "Cast").input[0], "MatMulInteger")
        scale = self._tensor(self._made_by(scaling.input[1], "Mul").input[1]).astype(np.float32)
        quantised, zero = (self._tensor(integer.input[i]).astype(np.float32) for i in (1, 3))
        return np.ascontiguousarray(((quantised - zero) * scale).T)

    def _tensor(self, name: str) -> npt.NDArray[np.generic]:
        if name not in self._initializers:
            raise GraphError(f"the graph has no weight {name}")
        return np.asarray(numpy_helper.to_array(self._initializers[name]))

    def _only_user(self, name: str, op_type: str) -> onnx.NodeProto:
        users: list[onnx.NodeProto] = [n for n in self._model.graph.node if name in n.input]
        if len(users) != 1 or users[0].op_type != op_type:
            raise GraphError(f"{name} is used by {[n.op_type for n in users]}, one {op_type} was expected")
        return users[0]

    def _made_by(self, name: str, op_type: str) -> onnx.NodeProto:
        node: onnx.NodeProto | None = self._producer.get(name)
        if node is None or node.op_type != op_type:
            raise GraphError(f"{name} is made by {node.op_type if node else 'no node'}, {op_type} was expected")
        return node

    def _ancestors(self, outputs: Iterable[str]) -> set[str]:
        """The names of all tensors that the outputs depend on, themselves included."""
        seen: set[str] = set()
        waiting = list(outputs)
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                if name in self._producer:
                    waiting.extend(self._producer[name].input)
        return seen
