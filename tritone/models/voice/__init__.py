"""The hibari voice: its "heart" (Apache-2.0) cut into a Talker and a VoiceBox.

text -> :class:`~tritone.models.voice.clauses.ClauseSplitter` -> clauses
     -> :class:`~tritone.models.voice.talker.HibariTalker`    -> :class:`~tritone.models.voice.frames.Frames`
     -> :func:`~tritone.models.voice.pauses.trim_pauses`      -> the same with less silence around the words
     -> :func:`~tritone.models.voice.chunks.plan_chunks`      -> chunks of frames
     -> :class:`~tritone.models.voice.voicebox.VoiceBoxStream` -> 24 kHz samples

The talker's side needs numpy, onnxruntime and hibari-tts; only ``decoder``, ``spectrum`` and ``voicebox``
import torch; only ``prepare`` needs onnx. This file imports none of them.
"""
