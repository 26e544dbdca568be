"""Speech tokens: 20 frames a second, three codes of 10 bits each, for the frames that the hibari VoiceBox takes.

:class:`~tritone.models.codec.codec.Codec` turns codes into :class:`~tritone.models.voice.frames.Frames` and back;
:func:`~tritone.models.codec.fit.fit_codec` makes its codebooks;
:class:`~tritone.models.codec.stretch.Stretch` changes the pace of frames. numpy only.
"""
