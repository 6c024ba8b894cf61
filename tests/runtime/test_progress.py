# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Claims about what is shown of long work."""

import contextlib
import io
import sys
import threading
import time

import pytest

from qarl_jax.runtime import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def soon(monkeypatch):
    """Lines after 0.05 s; in a terminal, tasks from the first moment."""
    monkeypatch.setattr(progress, "FIRST_S", 0.05)
    monkeypatch.setattr(progress, "_SHORT_S", 0.0)


def test_a_task_says_how_far_it_is_and_how_long_it_takes():
    task = progress.Task("reading", 300, "parameters", began=time.monotonic() - 12)
    assert task.far() == "0 of 300 parameters, 12 s"
    assert len(list(task.count(range(100)))) == 100
    assert task.far() == "100 of 300 parameters, 12 s, 24 s left"
    assert progress.Task("waiting", None, "", began=time.monotonic() - 12).far() == "12 s"


def test_tasks_of_all_threads_run_until_they_end_whatever_they_raise():
    inside, over = threading.Event(), threading.Event()

    def work():
        with progress.task("other"):
            inside.set()
            over.wait(10)

    thread = threading.Thread(target=work)
    with contextlib.suppress(KeyError), progress.task("mine"):
        thread.start()
        inside.wait(10)
        assert [one.name for one in progress.running()] == ["mine", "other"]
        raise KeyError
    over.set()
    thread.join()
    assert progress.running() == []


def test_outside_a_terminal_what_lasts_is_told_in_ever_fewer_lines_and_each_name_once(soon):
    stream = io.StringIO()
    with progress.shown(stream):
        for _ in range(2):
            with progress.task("compiling", 4, "programs") as task:
                task.done = 1
                time.sleep(0.3)  # told after 0.05 and 0.15 s; the next would be due after 0.45 s
    lines = stream.getvalue().splitlines()
    assert lines == ["compiling: 1 of 4 programs, 0 s, 0 s left"] * 2


def test_in_a_terminal_it_is_shown_while_it_runs_and_taken_away(soon, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with progress.shown(stream), progress.task("compiling", 4, "programs"):
        time.sleep(0.4)
    shown = stream.getvalue()
    assert "compiling" in shown
    assert "0 of 4 programs" in shown
    assert shown.rindex("compiling") < shown.rindex("\x1b[2K")  # erased at the end


def test_what_a_command_prints_into_a_file_gets_there_while_progress_is_shown(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    file = io.StringIO()
    monkeypatch.setattr(sys, "stdout", file)
    with progress.shown(Terminal()):
        print("{}")
    assert file.getvalue() == "{}\n"
