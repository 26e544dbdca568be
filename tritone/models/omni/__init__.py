"""Omni checkpoints (Qwen3-Omni, Qwen2.5-Omni), part by part: each part loads only its own tensors."""
