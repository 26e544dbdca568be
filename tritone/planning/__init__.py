"""How much memory a deployment takes: arithmetic over a checkpoint's ``config.json``, without weights and without torch."""

from tritone.planning.memory import Memory
from tritone.planning.model import ARCHITECTURES, Model, read_model
from tritone.planning.plan import Plan, plan

__all__ = ["ARCHITECTURES", "Memory", "Model", "Plan", "plan", "read_model"]
