# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A grading process: one JSON task per line on stdin, one JSON answer per line on stdout (see `pool.py`).

It is run as a script and imports nothing of qarl_jax, so it holds no JAX. Only a reward model ("model") takes a GPU. It
expects to be killed:
symbolic algebra on model output can hang inside native code, which no Python timeout reaches, or ask for all memory. A
user's function may do anything. It leads a process group of its own, which is killed with it.
"""

import base64
import contextlib
import ctypes
import faulthandler
import functools
import glob
import importlib
import importlib.util
import inspect
import json
import os
import pickle
import random
import signal
import sys
import threading
import time
import warnings


def main() -> None:
    kind, timeout_s, memory_mb, setup = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    with contextlib.suppress(AttributeError):  # PR_SET_PDEATHSIG: one that is stopped notices the trainer's end, too
        ctypes.CDLL(None).prctl(1, signal.SIGCONT, 0, 0, 0)
    threading.Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    mine = os.getpid()
    # Libraries may print; only this file writes to the pipe.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    tasks = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    graders = {
        "math": load_math,
        "gym": load_gym,
        "function": load_function,
        "code": load_code,
        "environment": load_environment,
        "model": load_model,
    }
    try:
        grade = graders[kind](timeout_s, setup)
    except BaseException as error:
        print(json.dumps({"error": message_of(error)}), file=pipe, flush=True)
        return
    limit_memory(memory_mb)
    if kind in ("math", "gym"):
        with contextlib.suppress(OSError):  # no filter on this machine: where the first wall is missing, that is said
            sandbox().lock_down()
    print(json.dumps({"ready": True}), file=pipe, flush=True)
    if kind == "environment":
        grade(tasks.fileno(), pipe)
        end_group()
    for line in tasks:
        task = json.loads(line)
        # Ends this process from a native thread, even if the trainer has died and the interpreter is stuck.
        faulthandler.dump_traceback_later(4 * timeout_s + 1, exit=True, file=sys.stderr)
        try:
            found = grade(task)
            answer: dict = {"score": 0.0, "scores": found} if kind == "model" else {"score": float(found)}
        except MemoryError:
            os._exit(3)
        except BaseException as error:  # sys.exit() in a user's function among them
            answer = {"score": 0.0, "error": message_of(error)}
        if os.getpid() != mine:
            os._exit(0)  # a copy that the task made of this process: only one may answer
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=pipe, flush=True)
    end_group()


def message_of(error: BaseException) -> str:
    """Returns the message of an error, cut after 400 characters."""
    text = str(error) if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
    return text if len(text) <= 400 else f"{text[:400]}..."


def end_with(parent: int) -> None:
    """Waits until the trainer's process ends, then kills this process and its descendants, even during a task."""
    while os.getppid() == parent:
        time.sleep(0.5)
    end_group()
    os._exit(1)  # behind a filter that lets no signal pass


def end_group() -> None:
    """Kills this process and its descendants."""
    end_started(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)


def children(pid: int) -> list[int]:
    """Returns the ids of a process's children; empty if /proc does not list them."""
    found: list[int] = []
    for path in glob.glob(f"/proc/{pid}/task/*/children"):
        try:
            with open(path) as file:
                found += map(int, file.read().split())
        except OSError:  # it has ended
            continue
    return found


def end_started(pid: int) -> None:
    """Kills the descendants of a process, including those in sessions of their own."""
    for _ in range(100):
        left, alive = children(pid), 0
        for each in left:
            left += children(each)
            try:
                with open(f"/proc/{each}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] != "Z":
                        os.kill(each, signal.SIGKILL)
                        alive += 1
            except OSError:  # it has ended
                continue
        if not alive:
            return
        time.sleep(0.001)


def limit_memory(megabytes: int) -> None:
    """Caps the address space, so that 10**10**10 fails here and not on the whole machine; 0: no cap."""
    if not megabytes:
        return
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def load_math(timeout_s: float, setup: str):
    """Returns a grader: task {"text", "answer", "allowed"} -> True if math-verify finds the answers equal or near."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)
    soft_s = max(1, int(timeout_s))

    @functools.lru_cache(maxsize=4096)
    def gold(answer: str):
        return parse(f"\\boxed{{{answer}}}", parsing_timeout=soft_s) or parse(answer, parsing_timeout=soft_s)

    def grade(task):
        reference = gold(task["answer"])
        given = parse(task["text"], parsing_timeout=soft_s)
        if not reference or not given:
            return False
        if verify(reference, given, timeout_seconds=soft_s):
            return True
        return "allowed" in task and near(given[0], reference[0], *task["allowed"])

    def near(given, expected, relative, absolute):
        """Tells whether two expressions have values as near as a benchmark's judge allows (math_verify.Allowed)."""
        try:
            a, b = (complex(each.evalf()) for each in (given, expected))
        except (AttributeError, TypeError, ValueError):  # text, sets, symbols
            return False
        if a.imag or b.imag:
            return False
        given, expected = a.real, b.real
        return any(
            abs(given - each) <= max(absolute, relative * max(abs(given), abs(each)))
            for each in (expected, expected / 100, expected * 100)
        )

    return grade


def load_gym(timeout_s: float, setup: str):
    """Returns a grader: task {"answer", "origin"} -> score of the answer by reasoning-gym's own scorer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as the source does
        import reasoning_gym

    @functools.lru_cache(maxsize=256)
    def dataset(name: str, seed: int, size: int, config: str):
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))

    @functools.lru_cache(maxsize=1024)
    def entry(name: str, seed: int, size: int, config: str, index: int):
        random.seed(index)  # as the source does (`data/sources/reasoning_gym.py`)
        return dataset(name, seed, size, config)[index]

    def grade(task):
        origin = task["origin"]
        key = (origin["dataset"], origin["seed"], origin["size"], json.dumps(origin["config"], sort_keys=True))
        return dataset(*key).score_answer(answer=task["answer"], entry=entry(*key, origin["index"]))

    return grade


def load_code(timeout_s: float, setup: str):
    """Returns a grader: task of `_sandbox.passes` -> True if the program passes all its tests."""
    passes = prepared(int(setup)).passes
    return lambda task: passes(task, 0.9 * timeout_s, int(setup))


def prepared(memory_mb: int):
    """Returns the sandbox's module after a trial run. Raises `RefusedError` if no program can be run here."""
    try:
        sandbox().prepare(memory_mb)
    except OSError as error:
        raise RefusedError(str(error)) from None
    return sandbox()


@functools.cache
def sandbox():
    """Loads the module `_sandbox.py` from this file's folder."""
    return load_file(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_sandbox.py"))


def load_file(path: str):
    """Loads a module by its file's path, because its folder is not on sys.path (see `pool.py`)."""
    spec = importlib.util.spec_from_file_location(os.path.basename(path)[:-3] + "_reward", path)
    assert spec is not None  # a .py file always has a loader
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class RefusedError(Exception):
    """A grader cannot start; the message says why."""


def load_function(timeout_s: float, setup: str):
    """Returns a grader: task {"call": base64 pickle of (text, answer, meta)} -> the value of the user's function."""
    sys.path[:], path, options = pickle.loads(base64.b64decode(setup))
    function = find_function(path)
    check_call(path, function, ("text", "answer", "meta"), options)
    return lambda task: function(*pickle.loads(base64.b64decode(task["call"])), **options)


def load_model(timeout_s: float, setup: str):
    """Returns a grader: task {"conversations": [messages, ...]} -> scores (qarl_bridge/engine/reward_model.py)."""
    module = importlib.import_module("qarl_bridge.engine.reward_model")
    try:
        return module.load(*json.loads(setup))
    except module.NoRewardModelError as error:
        raise RefusedError(str(error)) from None


def load_environment(timeout_s: float, setup: str):
    """Returns a server of an environment's episodes over pipes (rollout/environments/_host.py, loaded by its path)."""
    sys.path[:], host, path, options, *limits = pickle.loads(base64.b64decode(setup))
    made = find_function(path)
    check_call(path, made, (), options)
    if isinstance(made, type):
        for name, argument in (("reset", "task"), ("step", "text")):
            if not callable(getattr(made, name, None)):
                raise RefusedError(f"{path} has no method {name!r}")
            if inspect.isfunction(inspect.getattr_static(made, name)):  # with the episode before its argument
                check_call(f"{path}.{name}", getattr(made, name), ("self", argument), {})
    return load_file(host).Host(made, options, *limits, children).serve


def check_call(path: str, function, arguments: tuple, options: dict) -> None:
    """Raises `RefusedError` if a function cannot be called with these arguments, before a policy is sampled."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of builtins: not known
        return
    try:
        signature.bind(*arguments, **options)
    except TypeError as error:
        call = ", ".join([*arguments, *(f"{name}=..." for name in options)])
        raise RefusedError(f"{path} is called with ({call}) and takes {signature}: {error}") from None


def find_function(path: str):
    """Imports "module:function" or "file.py:function"; the function may be a class."""
    where, _, name = path.rpartition(":")
    try:
        if where.endswith(".py"):
            if not os.path.isfile(where):
                raise RefusedError(f"no such file {where} in {os.getcwd()}, where the run was started")
            module = load_file(where)
        else:
            module = importlib.import_module(where)
    except RefusedError:
        raise
    except BaseException as error:
        raise RefusedError(f"importing {where} failed: {type(error).__name__}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        raise RefusedError(f"{where} has no function {name!r}")
    return function


if __name__ == "__main__":
    main()
