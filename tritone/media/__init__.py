"""Audio and images of a request: checked, decoded, and cut out of its messages."""

from tritone.media.audio import AudioClip, clip_of_samples, decode_audio
from tritone.media.images import Picture, decode_picture
from tritone.media.parts import MediaParts, Medium

__all__ = ["AudioClip", "MediaParts", "Medium", "Picture", "clip_of_samples", "decode_audio", "decode_picture"]
