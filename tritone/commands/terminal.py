"""What the commands print with: plain lines where the output is not a terminal."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

console = Console(highlight=False)
errors = Console(stderr=True, highlight=False)


class ProgressLine:
    """One progress bar for a sequence of steps; an instance is a :class:`tritone.checkpoints.Progress`.

    Each step that ended stays as a line; without a terminal each step is printed once.
    """

    def __init__(self) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=30),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=errors,
            disable=not errors.is_terminal,
        )
        self._line = ""
        self._task: TaskID | None = None

    def __call__(self, line: str, done: int = 0, total: int = 0) -> None:
        if line != self._line:
            self._finish()
            self._line = line
            self._task = self._progress.add_task(line, total=total or None)
            if not errors.is_terminal:
                errors.print(line, markup=False, soft_wrap=True)
        if self._task is not None and total:
            self._progress.update(self._task, completed=done, total=total)

    def _finish(self) -> None:
        if self._task is not None:
            task = next(task for task in self._progress.tasks if task.id == self._task)
            total = task.total or 1
            self._progress.update(self._task, completed=total, total=total)
        self._task = None

    def __enter__(self) -> ProgressLine:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self._finish()
        self._progress.stop()
