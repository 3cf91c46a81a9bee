"""Progress of long work for people: a live bar in a terminal, a plain line now and then elsewhere.

Owns how progress looks. Knows nothing of what is counted. Everything goes to standard error, so that standard
output stays the result. The bar is drawn with rich, imported on first use.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_INTERVAL_SECONDS = 5.0
"""Between two lines where there is no terminal: a log should show life without filling up."""


class Progress:
    """Counts finished items and generated tokens of one piece of work. Made by `progress_bar`."""

    def __init__(self, total: int, *, done: int = 0) -> None:
        self.total = total
        self.done = done
        self.tokens = 0

    def advance(self, items: int = 1, *, tokens: int = 0) -> None:
        """`items` more are done, and `tokens` more were generated."""
        self.done += items
        self.tokens += tokens
        self._changed()

    def note(self, text: str) -> None:
        """Show one line beside the bar without disturbing it."""

    def _changed(self) -> None:
        """Nothing to draw: this one only counts."""


class _RichProgressBar(Progress):
    def __init__(self, bar: RichProgress, task: TaskID, total: int, done: int) -> None:
        super().__init__(total, done=done)
        self._bar = bar
        self._task = task
        self._started = time.monotonic()

    def note(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def _changed(self) -> None:
        rate = self.tokens / max(time.monotonic() - self._started, 1e-6)
        self._bar.update(self._task, completed=self.done, rate=f"{rate:,.0f} tok/s" if self.tokens else "")


class _PlainProgress(Progress):
    def __init__(
        self, label: str, unit: str, out: TextIO, total: int, done: int, clock: Callable[[], float]
    ) -> None:
        super().__init__(total, done=done)
        self._label, self._unit, self._out, self._clock = label, unit, out, clock
        self._started = self._last = clock()

    def note(self, text: str) -> None:
        print(text, file=self._out, flush=True)

    def _changed(self) -> None:
        now = self._clock()
        if self.done < self.total and now - self._last < PLAIN_INTERVAL_SECONDS:
            return
        self._last = now
        elapsed = max(now - self._started, 1e-6)
        rate = f", {self.tokens / elapsed:,.0f} tok/s" if self.tokens else ""
        percent = 100 * self.done // max(self.total, 1)
        print(
            f"{self._label}: {self.done}/{self.total} {self._unit} ({percent} %), {elapsed:.0f} s{rate}",
            file=self._out,
            flush=True,
        )


@contextmanager
def progress_bar(
    label: str,
    total: int,
    *,
    unit: str = "requests",
    enabled: bool = True,
    done: int = 0,
    out: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Progress]:
    """A bar for `total` items, of which `done` were finished earlier, while the block runs.

    `enabled` False counts only. `out`: standard error by default.
    """
    stream = sys.stderr if out is None else out
    if not enabled:
        yield Progress(total, done=done)
    elif not stream.isatty():
        yield _PlainProgress(label, unit, stream, total, done, clock)
    else:
        with _rich_bar(stream) as bar:
            task = bar.add_task(label, total=total, completed=done, rate="", unit=unit)
            yield _RichProgressBar(bar, task, total, done)


def _rich_bar(stream: Any) -> RichProgress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=Console(file=stream),
    )
