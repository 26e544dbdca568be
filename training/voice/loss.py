"""What a batch costs: cross entropy of the next token, and of the residual codes of a share of the frames."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from training.voice.batches import IGNORED, Batch
from tritone.models.talker.config import READ
from tritone.models.talker.model import TalkerModel

MASKED = 0.3
"""Share of the frames that the model does not see, so that it reads the text rather than continues the sound."""

RESIDUAL_SHARE = 0.5
RESIDUAL_WEIGHT = 0.3


def losses(model: TalkerModel, batch: Batch, draw: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """(codebook 0 with READ and END, mean of the residual codebooks) in nats. ``draw`` hides frames and picks those whose
    residual codes count; without it none is hidden and all count."""
    hidden = model.model(inputs(model, batch, draw)).flatten(0, 1)
    first = F.cross_entropy(model.lm_head(hidden).float(), batch.targets, ignore_index=IGNORED)
    chosen = torch.arange(len(batch.codes))
    if draw is not None:
        chosen = chosen[torch.rand(len(chosen), generator=draw) < RESIDUAL_SHARE]
    codes = batch.codes[chosen]
    logits = model.residual_logits(hidden[batch.frame_places[chosen] - 1], codes)
    rest = torch.stack([F.cross_entropy(part.float(), codes[:, index + 1]) for index, part in enumerate(logits)]).mean()
    return first, rest


def inputs(model: TalkerModel, batch: Batch, draw: torch.Generator | None) -> Tensor:
    """The decoder's input, [R, T, hidden]; zeros where a row has ended."""
    vectors = model.text_encoder(batch.ids, batch.mask)[0][batch.unit_ids]
    frames = model.code_embeddings(batch.codes)
    if draw is not None:
        frames = frames * (torch.rand(len(frames), 1, generator=draw) >= MASKED)
    ends = model.unit_inputs(model.text_encoder.end_of_text).expand(len(batch.end_places), -1)
    starts = model.speaker_embedding(torch.zeros_like(batch.start_places))
    x = frames.new_zeros(batch.shape[0] * batch.shape[1], frames.shape[1])
    places = torch.cat([batch.unit_places, batch.frame_places, batch.end_places, batch.start_places])
    x = x.index_copy(0, places, torch.cat([model.unit_inputs(vectors, batch.contexts), frames, ends, starts]))
    return x.view(*batch.shape, -1)


def accuracy(model: TalkerModel, batch: Batch) -> tuple[float, float]:
    """Shares of codebook 0's tokens, and of READ and END's, that are the likeliest."""
    hidden = model.model(inputs(model, batch, None)).flatten(0, 1)
    right = model.lm_head(hidden).argmax(-1) == batch.targets
    asked = batch.targets >= READ
    spoken = (batch.targets >= 0) & ~asked
    return right[spoken].float().mean().item(), right[asked].float().mean().item()
