"""What precisions are measured by."""

from tritone.evaluation.tasks.choice import Choice
from tritone.evaluation.tasks.greedy import Greedy
from tritone.evaluation.tasks.likelihood import Likelihood
from tritone.evaluation.tasks.task import Raw, Task
from tritone.evaluation.tasks.tools import Tools

__all__ = ["Choice", "Greedy", "Likelihood", "Raw", "Task", "Tools"]
