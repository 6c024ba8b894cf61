# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Reports progress of long tasks: name, amount done, time left.

    with progress.task("reading weights", total=339, unit="parameters") as task:
        ...
        task.done += 1

A task only registers itself. An entry point (`shown`) or a run's live view displays it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

FIRST_S = 10.0  # outside a terminal: when a task is told of first; each further line comes after three times as long
_SHORT_S = 0.5  # in a terminal: shorter tasks would only flicker


@dataclasses.dataclass(eq=False)
class Task:
    """A running piece of work.

    Attributes:
      name: what is being done. unit: unit of `total` and `done`, in the plural.
      total: amount of work; None if unknown.
      done: amount done; the work itself increases it.
      began: start in seconds of `time.monotonic`.
    """

    name: str
    total: float | None
    unit: str
    done: float = 0
    began: float = dataclasses.field(default_factory=time.monotonic)

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yields `items` and counts them as done."""
        for item in items:
            yield item
            self.done += 1

    @property
    def seconds(self) -> float:
        """Time since the task began."""
        return time.monotonic() - self.began

    def far(self) -> str:
        """Formats the known parts of the progress: "120 of 339 parameters, 12 s, 22 s left"."""
        parts = [f"{self.seconds:.0f} s"]
        if self.total:
            parts.insert(0, f"{self.done:,.0f} of {self.total:,.0f} {self.unit}".rstrip())
            if 0 < self.done < self.total:
                parts.append(f"{self.seconds / self.done * (self.total - self.done):.0f} s left")
        return ", ".join(parts)


_lock = threading.Lock()
_tasks: list[Task] = []


def running() -> list[Task]:
    """Lists the running tasks of all threads, oldest first."""
    with _lock:
        return list(_tasks)


@contextlib.contextmanager
def task(name: str, total: float | None = None, unit: str = "") -> Iterator[Task]:
    """Registers a `Task` while the block runs, and yields it.

    Args:
      total: amount of work in `unit`, e.g. responses; None: unknown.
    """
    made = Task(name, total, unit)
    with _lock:
        _tasks.append(made)
    try:
        yield made
    finally:
        with _lock:
            _tasks.remove(made)


def is_terminal(stream: Any) -> bool:
    """Tells whether `stream` is a terminal whose cursor can be moved."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def renderable() -> Any:
    """Draws the running tasks for a terminal (rich): a line each, with a bar if the total is known."""
    from rich.progress_bar import ProgressBar
    from rich.spinner import Spinner
    from rich.table import Table

    grid = Table.grid(padding=(0, 1))
    for one in running():
        if one.seconds > _SHORT_S:
            bar = ProgressBar(total=one.total, completed=one.done, width=20) if one.total else ""
            grid.add_row(Spinner("dots"), one.name, bar, one.far())
    return grid


@contextlib.contextmanager
def reporting(say: Callable[[str], None]) -> Iterator[None]:
    """Calls `say` with lines about long tasks while the block runs; of tasks with one name only the first counts."""
    over = threading.Event()
    due: dict[str, tuple[Task, float]] = {}

    def watch() -> None:
        while not over.wait(FIRST_S / 10):
            for one in running():
                first, at = due.setdefault(one.name, (one, FIRST_S))
                if first is one and one.seconds >= at:
                    due[one.name] = one, 3 * at
                    with contextlib.suppress(OSError, ValueError):  # a closed pipe or file, a full disk
                        say(f"{one.name}: {one.far()}")

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextlib.contextmanager
def shown(stream: Any = None) -> Iterator[None]:
    """Shows the running tasks on `stream` (None: standard error) during the block: bars in a terminal, else lines."""
    stream = sys.stderr if stream is None else stream
    if not is_terminal(stream):
        with reporting(lambda line: print(line, file=stream, flush=True)):
            yield
        return
    from rich.console import Console
    from rich.live import Live

    both = sys.stdout.isatty()  # else standard output is a file, which must get what is printed
    with Live(
        console=Console(file=stream),
        get_renderable=renderable,
        transient=True,
        redirect_stdout=both,
        redirect_stderr=True,
    ):
        yield
