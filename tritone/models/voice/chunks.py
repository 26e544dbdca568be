"""How the frames of a clause are cut into chunks on their way to the VoiceBox: the first small, then
growing; or all large, where the option ``audio_mode`` is ``quality``."""

from __future__ import annotations

LOOKAHEAD_FRAMES = 29
"""Frames the VoiceBox must have seen beyond the last frame it can sound: 27 for the decoder's receptive field
and 2 for the overlapping windows of the inverse STFT (n_fft is four hops)."""

STEP_FRAMES = 20
"""Frames of sound that the first chunk gives: 0.25 s at 80 frames a second."""

LARGEST_BLOCK = 4 * STEP_FRAMES


def block_frames(index: int, mode: str = "latency") -> int:
    """Frames of the VoiceBox's block `index` of a clause: 49 (20 of sound), 20, 40, then 80 each; in mode
    `quality` 109 (80 of sound), then 80 each.

    No block is longer than the sound of those before it, so even a Talker that is barely faster than real
    time fills the next block before the sound runs out; the later blocks are long because long matrix
    products are cheaper by the frame.
    """
    if mode == "quality":
        return LARGEST_BLOCK if index else LOOKAHEAD_FRAMES + LARGEST_BLOCK
    if index == 0:
        return LOOKAHEAD_FRAMES + STEP_FRAMES
    return min(STEP_FRAMES << min(index - 1, 8), LARGEST_BLOCK)


def plan_chunks(total: int, mode: str = "latency") -> list[int]:
    """Chunk sizes, in frames, that add up to `total`; none for 0. Raises ValueError for a negative total.

    The chunks are the VoiceBox's blocks, so that none waits there for its neighbour. A rest shorter than
    STEP_FRAMES joins the chunk before it: the sound of that chunk's end has to wait for it anyway.
    """
    if total < 0:
        raise ValueError(f"total is {total}; it must not be negative")
    sizes: list[int] = []
    left = total
    while left > 0:
        size = min(block_frames(len(sizes), mode), left)
        if left - size < STEP_FRAMES:
            size = left
        sizes.append(size)
        left -= size
    return sizes
