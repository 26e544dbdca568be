"""Where a checkpoint keeps its decoders: an omni checkpoint holds a thinker and a talker, others are one decoder."""

from __future__ import annotations

from dataclasses import dataclass

from tritone.errors import bad


@dataclass(frozen=True)
class Part:
    """One decoder of a checkpoint.

    ``section``: the keys in ``config.json`` that lead to its text configuration. ``model``: what stands before ``.layers``
    and ``.norm`` in the names of its tensors; ``embedding`` and ``head``: the names of those two, without ``.weight``.
    """

    section: tuple[str, ...]
    model: str
    embedding: str
    head: str

    @property
    def scope(self) -> str:
        """A tensor whose name begins so must be known; others may belong to other parts."""
        return f"{self.model}.layers." if self.section else ""


WHOLE = Part((), "model", "model.embed_tokens", "lm_head")
THINKER = Part(("thinker_config", "text_config"), "thinker.model", "thinker.model.embed_tokens", "thinker.lm_head")
PARTS = {
    "qwen3_omni_moe": {
        "thinker": THINKER,
        "talker": Part(("talker_config", "text_config"), "talker.model", "talker.model.codec_embedding", "talker.codec_head"),
        # One of its embeddings and one of its heads; the others are read apart.
        "code_predictor": Part(
            ("talker_config", "code_predictor_config"),
            "talker.code_predictor.model",
            "talker.code_predictor.model.codec_embedding.0",
            "talker.code_predictor.lm_head.0",
        ),
    },
    "qwen2_5_omni": {
        "thinker": THINKER,
        "talker": Part(("talker_config",), "talker.model", "talker.model.embed_tokens", "talker.codec_head"),
    },
}
"""The parts of checkpoints that have several, by ``model_type`` of the whole and name."""


def part_of(model_type: str | None, name: str | None) -> Part:
    """The part ``name`` of a checkpoint of ``model_type``; None is the one that answers: the thinker, or the whole.

    Raises ``InvalidArgument`` for a name that the checkpoint does not have.
    """
    named = PARTS.get(model_type or "", {})
    if name is None:
        return named.get("thinker", WHOLE)
    if name not in named:
        raise bad("part", name, ", ".join(named) or f"none: {model_type} is one decoder")
    return named[name]
