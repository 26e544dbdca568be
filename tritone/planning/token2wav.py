"""Tensors of Qwen2.5-Omni's token2wav: a diffusion transformer with a speaker encoder, and BigVGAN."""

from __future__ import annotations

from tritone.planning.fields import Section
from tritone.planning.tensors import Part, Tensors, convolution, matrix, vectors

TIME_WIDTH = 256
"""Of the sinusoids that stand for the diffusion time."""
BRANCHES = 3
"""Pairs of convolutions in one residual block of BigVGAN."""


def dit(prefix: str, config: Section) -> Part:
    width, layers, mel = config.number("hidden_size"), config.number("num_hidden_layers"), config.number("mel_dim")
    heads, inner = config.number("num_attention_heads") * config.number("head_dim"), width * config.number("ff_mult")
    condition = config.number("enc_dim") + config.number("enc_emb_dim") + config.number("emb_dim")
    base = f"{prefix}transformer_blocks.0."
    made = []
    for name in ("to_q", "to_k", "to_v"):
        made += matrix(f"{base}attn.{name}", heads, width, layers, bias=True)
    return Part(
        "token2wav dit",
        (
            *matrix(f"{prefix}time_embed.time_mlp.0", width, TIME_WIDTH, bias=True),
            *matrix(f"{prefix}time_embed.time_mlp.2", width, width, bias=True),
            # One more than the codes: the one that stands for none.
            *matrix(f"{prefix}text_embed.codec_embed", config.number("num_embeds") + 1, config.number("emb_dim")),
            *matrix(f"{prefix}input_embed.proj", width, mel + condition, bias=True),
            *_speaker_encoder(f"{prefix}input_embed.spk_encoder.", config),
            *made,
            *matrix(f"{base}attn.to_out.0", width, heads, layers, bias=True),
            *matrix(f"{base}attn_norm.linear", 6 * width, width, layers, bias=True),
            *matrix(f"{base}ff.ff.0", inner, width, layers, bias=True),
            *matrix(f"{base}ff.ff.3", width, inner, layers, bias=True),
            *matrix(f"{prefix}norm_out.linear", 2 * width, width, bias=True),
            *matrix(f"{prefix}proj_out", mel, width, bias=True),
        ),
    )


def _speaker_encoder(prefix: str, config: Section) -> list[Tensors]:
    """ECAPA-TDNN."""
    channels, kernels = config.numbers("enc_channels"), config.numbers("enc_kernel_sizes")
    scale, squeezed = config.number("enc_res2net_scale"), config.number("enc_se_channels")
    attention, last = config.number("enc_attention_channels"), channels[-1]
    made = _conv1d(f"{prefix}blocks.0.conv", channels[0], config.number("mel_dim"), kernels[0])
    for index in range(1, len(channels) - 1):
        base, width, part = f"{prefix}blocks.{index}.", channels[index], channels[index] // scale
        made += _conv1d(f"{base}tdnn1.conv", width, channels[index - 1])
        if scale > 1:
            made += _conv1d(f"{base}res2net_block.blocks.0.conv", part, part, kernels[index], scale - 1)
        made += _conv1d(f"{base}tdnn2.conv", width, width)
        made += _conv1d(f"{base}se_block.conv1", squeezed, width)
        made += _conv1d(f"{base}se_block.conv2", width, squeezed)
    return [
        *made,
        *_conv1d(f"{prefix}mfa.conv", last, last, kernels[-1]),
        *_conv1d(f"{prefix}asp.tdnn.conv", attention, 3 * last),
        *_conv1d(f"{prefix}asp.conv", last, attention),
        *_conv1d(f"{prefix}fc", config.number("enc_dim"), 2 * last),
    ]


def bigvgan(prefix: str, config: Section) -> Part:
    width = config.number("upsample_initial_channel")
    made = _conv1d(f"{prefix}conv_pre", width, config.number("mel_dim"), 7)
    kernels = config.numbers("resblock_kernel_sizes")
    for index, kernel in enumerate(config.numbers("upsample_kernel_sizes")):
        half = width // 2
        made += convolution(f"{prefix}ups.{index}.0", (width, half, kernel), half)
        for number, size in enumerate(kernels):
            base = f"{prefix}resblocks.{index * len(kernels) + number}."
            made += _conv1d(f"{base}convs1.0", half, half, size, 2 * BRANCHES)
            made += vectors((f"{base}activations.0.act.alpha", f"{base}activations.0.act.beta"), half, 2 * BRANCHES)
        width = half
    made += vectors((f"{prefix}activation_post.act.alpha", f"{prefix}activation_post.act.beta"), width)
    return Part("token2wav bigvgan", (*made, *convolution(f"{prefix}conv_post", (1, width, 7))))


def _conv1d(name: str, outputs: int, inputs: int, kernel: int = 1, count: int = 1) -> list[Tensors]:
    return convolution(name, (outputs, inputs, kernel), outputs, count)
