"""What each stage of a deployment takes of one memory, and what fits into the rest.

A stage's memory is its weights and its pools: pages of keys and values, the rows that prefill keeps beside them for the
Talker, and the blocks that carry hidden states to it. What computing takes besides (activations, a GPU's context and
workspaces) is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tritone.deployment import DENSE_NAMES, DENSE_WEIGHTS, OWN_VOICE, Deployment, EngineStage
from tritone.errors import bad
from tritone.planning.decoders import DecoderSizes
from tritone.planning.memory import Memory, shown
from tritone.planning.model import Model
from tritone.planning.stored import Stored, stored_precisions
from tritone.planning.tensors import Part, Precision, Tensors, dense_bytes
from tritone.sizes import HIDDEN_ROWS, ITEM_SIZES, KV_DTYPES

PAGES, ROWS = "pages", "rows for the talker"
QUANTISED = ("fp8", "int8", "int4")
TALKER_GROUP = 64
VOICEBOX = "float32"
"""What vocoders compute in: in bfloat16 the diffusion of token2wav fails."""


@dataclass(frozen=True)
class Pool:
    name: str
    blocks: int
    block_bytes: int

    @property
    def nbytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass(frozen=True)
class Stage:
    """One stage as deployed: ``weights`` and ``kv`` are keys of the two tables of bytes; ``kv`` is "" without pages.

    ``weight_bytes``: all its weights, by precision. ``kv_bytes``: keys and values of one token, by precision; ``row_bytes``:
    what is kept beside them for the Talker.
    """

    name: str
    parts: tuple[Part, ...]
    weights: str
    kv: str
    weight_bytes: Mapping[str, int]
    kv_bytes: Mapping[str, int]
    page_size: int
    pools: tuple[Pool, ...]
    row_bytes: int = 0

    @property
    def pool_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def page_bytes(self) -> int:
        """What the page pool takes as deployed, with the rows beside its pages."""
        return sum(pool.nbytes for pool in self.pools if pool.name in (PAGES, ROWS))

    def token_bytes(self, kv: str) -> int:
        """Of one token in a page of this precision."""
        return self.kv_bytes[kv] + self.row_bytes

    @property
    def nbytes(self) -> int:
        return self.weight_bytes[self.weights] + self.pool_bytes


@dataclass(frozen=True)
class Plan:
    """``context`` is the length, in tokens, that sessions are counted at."""

    model: Model
    memory: Memory
    context: int
    stages: tuple[Stage, ...]

    @property
    def nbytes(self) -> int:
        """Weights and pools of all stages, as deployed."""
        return sum(stage.nbytes for stage in self.stages)

    def tokens(self, stage: Stage, weights: str, kv: str) -> int:
        """Tokens that fit into ``stage``'s page pool in these precisions if it gets all that the others, and its other
        pools, leave as they are deployed. Whole pages."""
        others = self.nbytes - stage.weight_bytes[stage.weights] - stage.page_bytes
        room = self.memory.nbytes - others - stage.weight_bytes[weights]
        return max(0, room // (stage.page_size * stage.token_bytes(kv))) * stage.page_size

    def sessions(self, stage: Stage, tokens: int) -> int:
        """Sequences of ``context`` tokens that a pool of ``tokens`` holds at once; each begins its own page."""
        return tokens // (-(-self.context // stage.page_size) * stage.page_size)

    def shortage(self) -> str:
        """By how much the memory is too small, as a sentence; "" where it is not."""
        weights = sum(stage.weight_bytes[stage.weights] for stage in self.stages)
        what, needed = ("the weights", weights) if weights > self.memory.nbytes else ("weights and pools", self.nbytes)
        if needed <= self.memory.nbytes:
            return ""
        parts = ", ".join(f"{stage.name} {shown(stage.weight_bytes[stage.weights])}" for stage in self.stages)
        more = needed - self.memory.nbytes
        return (
            f"{what} take {shown(needed)}, {shown(more)} more than {self.memory.option} {self.memory.text} "
            f"(weights: {parts}); choose smaller precisions{'' if what == 'the weights' else ' or pools'}"
        )


def plan(
    deployment: Deployment,
    model: Model,
    memory: Memory,
    context: int = 0,
    prefill: Model | None = None,
    decode: Model | None = None,
) -> Plan:
    """``prefill`` and ``decode`` are the models of their own checkpoints, where they have some.

    ``context`` 0 is the deployment's longest request, else the checkpoint's."""
    longest = model.max_positions
    if not 0 <= context <= longest:
        raise bad("--context", context, f"1 to {longest}, the checkpoint's longest")
    own_voice = deployment.voice == OWN_VOICE
    if own_voice and model.talker_text is None:
        raise bad("voice", deployment.voice, f"another one or null: {model.architecture} has no voice of its own")
    stages = [
        _engine("prefill", deployment, deployment.prefill, prefill or model, memory, first=True),
        _engine("decode", deployment, deployment.decode, decode or model, memory, first=False),
    ]
    if own_voice and model.talker_text is not None:
        stages.append(_talker(deployment, model, model.talker_text, memory))
        weights = {VOICEBOX: _sum(model.voicebox, Precision(VOICEBOX, VOICEBOX))}
        stages.append(Stage("voicebox", model.voicebox, VOICEBOX, "", weights, {}, deployment.page_size, ()))
    return Plan(model, memory, context or min(deployment.max_context or longest, longest), tuple(stages))


def _engine(name: str, deployment: Deployment, part: EngineStage, model: Model, memory: Memory, *, first: bool) -> Stage:
    """``first``: prefill, which reads media, and keeps what the checkpoint's own Talker gets of each token."""
    dense = part.weights if part.weights in DENSE_WEIGHTS else _dense(part.dtype, memory)
    parts = (*(model.towers if first else ()), *model.thinker)
    if model.tied and memory.packed_head:
        parts = (*parts, Part("packed head", (Tensors("packed head", (model.text.vocabulary, model.text.hidden)),)))
    stored = stored_precisions(model.config, dense)
    kv = dense if part.kv == "auto" else part.kv
    kv_bytes = _kv_bytes(model.text, dict.fromkeys((dense, "fp8", kv)))
    page = deployment.page_size * kv_bytes[kv]
    pages = part.pool_bytes // page if part.pool_bytes else part.pool_tokens // deployment.page_size
    pools, row = [Pool(PAGES, pages, page)], 0
    if first and deployment.voice == OWN_VOICE:
        row = model.text.hidden * dense_bytes(dense)
        pools.append(Pool(ROWS, pages, deployment.page_size * row))
    if deployment.voice:
        block = HIDDEN_ROWS * model.text.hidden * dense_bytes(dense)
        pools.append(Pool("hidden states", deployment.talker.hidden_blocks, block))
    return Stage(
        name,
        parts,
        weights=_chosen(part, dense, stored),
        kv=kv,
        weight_bytes=_weight_bytes(parts, dense, part.group, stored),
        kv_bytes=kv_bytes,
        page_size=deployment.page_size,
        pools=tuple(pools),
        row_bytes=row,
    )


def _talker(deployment: Deployment, model: Model, text: DecoderSizes, memory: Memory) -> Stage:
    dense = _dense(deployment.talker.dtype, memory)
    kv_bytes = _kv_bytes(text, (dense, "fp8"))
    page = deployment.page_size * kv_bytes[dense]
    return Stage(
        "talker",
        model.talker,
        weights=dense,
        kv=dense,
        weight_bytes=_weight_bytes(model.talker, dense, TALKER_GROUP, stored_precisions(model.config, dense)),
        kv_bytes=kv_bytes,
        page_size=deployment.page_size,
        pools=(Pool(PAGES, deployment.talker.pool_tokens // deployment.page_size, page),),
    )


def _dense(dtype: str, memory: Memory) -> str:
    return memory.dense if dtype == "auto" else DENSE_NAMES[dtype]


def _chosen(part: EngineStage, dense: str, stored: Stored | None) -> str:
    """Which row of ``_weight_bytes`` is deployed."""
    if part.weights in DENSE_WEIGHTS:
        return dense
    if stored is not None:
        return "stored"
    return dense if part.weights == "auto" else part.weights


def _weight_bytes(parts: tuple[Part, ...], dense: str, group: int, stored: Stored | None) -> dict[str, int]:
    """Dense, and made here in each precision; of a quantised checkpoint: dense, and as it is stored."""
    rows = {dense: _sum(parts, Precision(dense, dense))}
    if stored is None:
        return rows | {name: _sum(parts, Precision(name, dense, group)) for name in QUANTISED}
    whole = Precision(dense, dense)
    return rows | {"stored": sum((stored(one) or whole).nbytes(one) for part in parts for one in part.tensors)}


def _sum(parts: tuple[Part, ...], precision: Precision) -> int:
    return sum(precision.nbytes(tensors) for part in parts for tensors in part.tensors)


def _kv_bytes(sizes: DecoderSizes, kinds: Mapping[str, None] | tuple[str, ...]) -> dict[str, int]:
    return {kind: sizes.kv_elements * ITEM_SIZES[KV_DTYPES[kind]] for kind in kinds}
