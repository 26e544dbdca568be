"""Checkpoints that hear, see and speak: Qwen3-Omni and Qwen2.5-Omni."""
