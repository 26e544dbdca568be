"""The VoiceBoxes of omni checkpoints: codes of a Talker in, 24 kHz samples out, chunk by chunk without a seam.

:func:`~tritone.models.omni.voicebox.loading.load_voicebox` -> :class:`~tritone.models.omni.voicebox.box.OmniVoiceBox`
    ``code2wav``  Qwen3-Omni: a causal network that carries its state from chunk to chunk
    ``token2wav`` Qwen2.5-Omni: flow matching in windows (``diffusion``), then BigVGAN in windows (``bigvgan``)
``plan`` says which codes make a chunk; ``speakers`` reads Qwen2.5-Omni's voices.
"""
