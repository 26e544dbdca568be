"""The Talker's network in plain torch, as it is trained. Tensor names are those of Qwen3 and Qwen3-Omni's talker."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tritone.models.talker.config import READ, VOCABULARY, TalkerConfig

Cache = dict[int, tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Causal attention with normalised queries and keys; ``layer`` is its key in a cache."""

    def __init__(self, config: TalkerConfig, layer: int) -> None:
        super().__init__()
        self._layer, self._head_dim = layer, config.head_dim
        hidden, inner = config.hidden_size, config.heads * config.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(hidden, inner, bias=False) for _ in "qkv")
        self.o_proj = nn.Linear(inner, hidden, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        weight = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        q, k, v = F.linear(x, weight).view(*x.shape[:-1], 3, -1, self._head_dim).permute(2, 0, 3, 1, 4)
        q, k = rotated(self.q_norm(q), rope).to(v.dtype), rotated(self.k_norm(k), rope).to(v.dtype)
        if cache is not None:
            if self._layer in cache:
                k, v = (torch.cat([old, new], 2) for old, new in zip(cache[self._layer], (k, v), strict=True))
            cache[self._layer] = (k, v)
        scores = q @ k.transpose(-1, -2) * self._head_dim**-0.5
        if q.shape[2] > 1:
            scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype).triu(1)
        mixed = scores.softmax(-1) @ v
        return F.linear(mixed.transpose(1, 2).flatten(2), self.o_proj.weight)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down_proj.weight)


class Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, config: TalkerConfig, inner: int, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = Mlp(config.hidden_size, inner)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Cache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, cache)
        made: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return made


class Stack(nn.Module):
    """Layers and the final norm, over positions ``first``, ``first`` + 1, ..."""

    def __init__(self, config: TalkerConfig, layers: int, inner: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, inner, index) for index in range(layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._theta, self._head_dim = config.rope_theta, config.head_dim

    def forward(self, x: Tensor, first: int = 0, cache: Cache | None = None) -> Tensor:
        """[B, T, hidden] -> [B, T, hidden] after the final norm."""
        steps = torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim
        angles = torch.arange(first, first + x.shape[1], dtype=torch.float32)[:, None] * (1.0 / self._theta**steps)
        rope = (angles.cos().repeat(1, 2), angles.sin().repeat(1, 2))
        for layer in self.layers:
            x = layer(x, rope, cache)
        normed: Tensor = self.norm(x)
        return normed


class Backbone(Stack):
    """The decoder; ``embed_tokens`` are codebook 0's codes, READ and END."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__(config, config.layers, config.intermediate_size)
        self.embed_tokens = nn.Embedding(VOCABULARY, config.hidden_size)


class PredictorStack(Stack):
    """The code predictor's layers; ``codec_embedding`` are the residual codebooks'."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__(config, config.predictor_layers, config.predictor_intermediate_size)
        tables = (nn.Embedding(config.entries, config.hidden_size) for _ in range(config.codebooks - 1))
        self.codec_embedding = nn.ModuleList(tables)


class CodePredictor(nn.Module):
    """A frame's residual codes, one after the other, from the hidden state and the code before."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.model = PredictorStack(config)
        heads = (nn.Linear(config.hidden_size, config.entries, bias=False) for _ in range(config.codebooks - 1))
        self.lm_head = nn.ModuleList(heads)


class TextBlock(nn.Module):
    """Depthwise convolution along the clause, then an MLP; both added to what came in."""

    def __init__(self, hidden: int, inner: int, taps: int, eps: float) -> None:
        super().__init__()
        self.conv = nn.Conv1d(hidden, hidden, taps, padding=taps // 2, groups=hidden)
        self.norm = nn.RMSNorm(hidden, eps)
        self.up_proj, self.down_proj = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.conv(x.transpose(1, 2)).transpose(1, 2))
        y: Tensor = x + self.down_proj(F.gelu(self.up_proj(mixed)))
        return y


class TextEncoder(nn.Module):
    """Phonemes of whole clauses to vectors."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.embedding = nn.Embedding(config.text_vocabulary, hidden)
        self.blocks = nn.ModuleList(
            TextBlock(hidden, config.text_intermediate_size, config.text_taps, config.rms_norm_eps)
            for _ in range(config.text_layers)
        )
        self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
        self.end_of_text = nn.Parameter(torch.zeros(hidden))

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        """Float [N, L, hidden] of ids int64 [N, L]; where mask, bool [N, L], is false there is no phoneme, and what comes out
        means nothing. Clauses that stand at least ``taps // 2`` apart do not see each other."""
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x if mask is None else x * mask[:, :, None])
        normed: Tensor = self.norm(x)
        return normed


class TalkerModel(nn.Module):
    """The whole network. ``context_projection`` and the speakers' vectors are slots: see the package's text."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, VOCABULARY, bias=False)
        self.code_predictor = CodePredictor(config)
        self.text_encoder = TextEncoder(config)
        self.context_projection = nn.Linear(config.context_hidden, config.hidden_size, bias=False)
        self.speaker_embedding = nn.Embedding(len(config.speakers), config.hidden_size)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.04)
        nn.init.zeros_(self.context_projection.weight)

    def code_embeddings(self, codes: Tensor) -> Tensor:
        """The input of a frame, [..., hidden]: the sum over its codes int64 [..., 3]."""
        total: Tensor = self.model.embed_tokens(codes[..., 0])
        for index, table in enumerate(self.code_predictor.model.codec_embedding):
            total = total + table(codes[..., index + 1])
        return total

    def unit_inputs(self, vectors: Tensor, contexts: Tensor | None = None) -> Tensor:
        """The input of units of text, or of its end, [N, hidden], from vectors [N, hidden] of the text encoder.

        contexts: the Thinker's hidden state for each, [N, context_hidden]; zeros where there is none.
        """
        rows = vectors + self.model.embed_tokens.weight[READ]
        if contexts is not None:
            rows = rows + self.context_projection(F.rms_norm(contexts.float(), contexts.shape[-1:]))
        return rows

    def residual_logits(self, hidden: Tensor, codes: Tensor) -> list[Tensor]:
        """Logits [N, 1024] of codebooks 1, 2, ... of N frames, given hidden [N, hidden] and codes int64 [N, >= 2]: all but
        the last are read."""
        predictor = self.code_predictor
        tables = [self.model.embed_tokens, *predictor.model.codec_embedding[:-1]]
        inputs = [hidden, *(table(codes[:, index]) for index, table in enumerate(tables))]
        out = predictor.model(torch.stack([part.to(inputs[1].dtype) for part in inputs], 1))
        return [head(out[:, index + 1]) for index, head in enumerate(predictor.lm_head)]


def rotated(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions on [..., T, head_dim]."""
    half = x.shape[-1] // 2
    return x * rope[0] + torch.cat([-x[..., half:], x[..., :half]], -1) * rope[1]
