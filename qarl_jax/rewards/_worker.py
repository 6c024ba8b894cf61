# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A grading process: one JSON task per line on stdin, one JSON answer per line on stdout (see `pool.py`).

It is run as a script and imports nothing of qarl_jax, so it holds no JAX and no device. It expects to be killed:
symbolic algebra on model output can hang inside native code where no Python timeout reaches, or ask for all memory.
"""

import faulthandler
import functools
import json
import os
import sys


def main() -> None:
    kind, timeout_s, memory_mb = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    # Libraries may print; only this file writes to the pipe.
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    graders = {"math": load_math, "gym": load_gym}
    grade = graders[kind](timeout_s)
    limit_memory(memory_mb)
    print(json.dumps({"ready": True}), file=pipe, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        # Ends this process from a native thread, even if the trainer has died and the interpreter is stuck.
        faulthandler.dump_traceback_later(4 * timeout_s + 1, exit=True, file=sys.stderr)
        try:
            answer: dict = {"score": float(grade(task))}
        except MemoryError:
            os._exit(3)
        except (Exception, RecursionError) as error:
            answer = {"score": 0.0, "error": f"{type(error).__name__}: {error}"[:200]}
        faulthandler.cancel_dump_traceback_later()
        print(json.dumps(answer), file=pipe, flush=True)


def limit_memory(megabytes: int) -> None:
    """Caps the address space, so that 10**10**10 fails here and not on the whole machine."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))


def load_math(timeout_s: float):
    """task {"text", "answer"} -> 1.0 if math-verify finds the answer equal to the reference."""
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
        return bool(reference) and bool(given) and verify(reference, given, timeout_seconds=soft_s)

    return grade


def load_gym(timeout_s: float):
    """task {"answer", "origin"} -> the data set's own score of the answer."""
    import reasoning_gym

    @functools.lru_cache(maxsize=256)
    def dataset(name: str, seed: int, size: int, config: str):
        return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(config))

    @functools.lru_cache(maxsize=1024)
    def entry(name: str, seed: int, size: int, config: str, index: int):
        return dataset(name, seed, size, config)[index]

    def grade(task):
        origin = task["origin"]
        key = (origin["dataset"], origin["seed"], origin["size"], json.dumps(origin["config"], sort_keys=True))
        return dataset(*key).score_answer(answer=task["answer"], entry=entry(*key, origin["index"]))

    return grade


if __name__ == "__main__":
    main()
