"""Shows a pipeline run on the terminal: a line per step, a bar per stage, a table at the end.

Promises: plain lines if the output is no terminal; an error here cannot fail a run.
"""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from flows.report.report import StageReport
from infra.tracking.journal import JournalRecord
from tasks.runner.run import StageResult, headline_metric
from tasks.runner.stage import StageObserver

DIGEST_DIGITS = 12
LABEL_WIDTH = 19


class TerminalDisplay(StageObserver):
    """Writes a run to the terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description:>19}"),
            BarColumn(bar_width=40),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar: TaskID | None = None

    def stage_started(self, label: str, fingerprint: str) -> None:
        """Remove the bar of the stage before; a new one appears with the first progress record."""
        self._end_bar()

    def message(self, label: str, text: str) -> None:
        """Print a line about a stage's job."""
        self._say(label, text)

    def record(self, label: str, record: JournalRecord) -> None:
        """Show a journal record of a running stage: message as a line, progress as a bar."""
        if record.message:
            self._say(label, record.message)
        if record.kind == "progress" and record.done is not None and record.total:
            self._show_bar(label, record.done, record.total)

    def stage_finished(self, result: StageResult) -> None:
        """Print a line that summarizes the stage."""
        self._end_bar()
        done = "reused" if result.reused else f"ran in {result.wall_s:.1f} s"
        parts = [done, f"digest {result.digest[:DIGEST_DIGITS]}", headline_metric(result.metrics)]
        self._say(result.label, ", ".join(part for part in parts if part))

    def close(self) -> None:
        """Stop the live display."""
        self._end_bar()
        self._progress.stop()

    def _say(self, label: str, message: str) -> None:
        self._console.print(
            f"{label:>{LABEL_WIDTH}}  {message}", highlight=False, markup=False, soft_wrap=True
        )

    def _show_bar(self, label: str, done: int, total: int) -> None:
        if self._bar is None:
            self._progress.start()
            self._bar = self._progress.add_task(label, total=total)
        self._progress.update(self._bar, completed=done, total=total)

    def _end_bar(self) -> None:
        if self._bar is not None:
            self._progress.remove_task(self._bar)
            self._bar = None
            self._progress.stop()


def summary_table(stages: Sequence[StageReport]) -> Table:
    """Return a table of stage, state, seconds, digest and headline metric."""
    seconds = Column("seconds", justify="right")
    table = Table("stage", "", seconds, "digest", "metric", show_edge=False, pad_edge=False)
    for stage in stages:
        table.add_row(
            stage.name,
            stage.state,
            f"{stage.seconds:.1f}",
            stage.digest[:DIGEST_DIGITS],
            headline_metric(stage.metrics),
        )
    return table
