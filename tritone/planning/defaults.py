"""What the parts of an omni checkpoint are where its ``config.json`` leaves a field out: transformers' own defaults.

Only for towers and vocoders, of which published files leave fields out; sizes of decoders must be in the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_AUDIO = {"num_mel_bins": 128, "encoder_layers": 32, "encoder_ffn_dim": 5120, "d_model": 1280, "output_dim": 3584}
_VISION = {"in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 3584}

AUDIO_3: Mapping[str, Any] = {**_AUDIO, "downsample_hidden_size": 480}
AUDIO_25: Mapping[str, Any] = _AUDIO
VISION_3: Mapping[str, Any] = {
    **_VISION, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "num_position_embeddings": 2304,
    "deepstack_visual_indexes": (8, 16, 24),
}  # fmt: skip
VISION_25: Mapping[str, Any] = {**_VISION, "depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "patch_size": 14}
CODE2WAV: Mapping[str, Any] = {
    "codebook_size": 2048, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 3072,
    "num_hidden_layers": 8, "num_quantizers": 16, "upsample_rates": (8, 5, 4, 3), "upsampling_ratios": (2, 2),
    "decoder_dim": 1536,
}  # fmt: skip
DIT: Mapping[str, Any] = {
    "hidden_size": 1024, "num_hidden_layers": 22, "num_attention_heads": 16, "head_dim": 64, "ff_mult": 2, "emb_dim": 512,
    "num_embeds": 8193, "mel_dim": 80, "enc_emb_dim": 192, "enc_dim": 128, "enc_channels": (256, 256, 256, 256, 768),
    "enc_kernel_sizes": (5, 3, 3, 3, 1), "enc_attention_channels": 64, "enc_res2net_scale": 2, "enc_se_channels": 64,
}  # fmt: skip
BIGVGAN: Mapping[str, Any] = {
    "mel_dim": 80, "upsample_initial_channel": 1536, "resblock_kernel_sizes": (3, 7, 11),
    "upsample_kernel_sizes": (11, 7, 4, 4, 4, 4),
}  # fmt: skip
