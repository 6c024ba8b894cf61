# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs each episode of an environment in a forked process. `rewards/_worker.py` starts it; it imports nothing of
qarl_jax.

A call is a line of JSON: {"episode": number, "reset": task} begins an episode, {"episode": number, "step": text} takes
a turn, {"episode": number} ends it. Each is answered by a line with the episode's number, as soon as it is done. An
episode has one call at a time.

The host imports the environment's class but never calls its methods. An episode is a fork of the host: it may raise,
exit, hang, take all memory or close its streams without harm to other episodes. Its threads and processes end with it.
"""

import asyncio
import collections
import contextlib
import ctypes
import gc
import inspect
import json
import os
import select
import signal
import socket
import sys
import time
import traceback

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER: orphans below become children of an episode, and of the host behind it
_LARGEST = 1e9  # of a reward: sums and squares of such numbers are finite in float32


class Host:
    """The process that forks an environment's episodes and passes calls and answers between them and the trainer.

    Args:
      make: the environment's class; called with `options` for every episode.
      options: keyword arguments of the class.
      step_s: seconds that a call may take.
      most: longest observation in characters; the rest is cut off.
      children: maps a process id to the ids of its child processes.
    """

    def __init__(self, make, options, step_s, most, children=lambda pid: []):
        self.make, self.options, self.step_s, self.most, self.children = make, options, step_s, most, children
        prepare = getattr(make, "prepare", None)
        if prepare is not None:
            prepare(**options)
        # Methods that do not give way hold a core; the others are answered all at the same time.
        plain = not inspect.iscoroutinefunction(getattr(make, "step", None))
        self.at_once = min(32, (os.cpu_count() or 1) + 4) if plain else sys.maxsize
        self.poll = select.poll()
        self.episodes = {}  # by number: (its process, our end of the wire to it, what came over it so far)
        self.numbers = {}  # by the wire's descriptor
        self.waiting: collections.deque = collections.deque()
        self.deadlines = {}  # by number, of calls that are being answered; the first is the next
        self.shared = set(children(os.getpid()))  # what the environment's module has started
        prctl(_SUBREAPER, 1)
        sys.stdout.flush()  # what is left in it, every copy would write
        gc.freeze()  # copies share the memory of what there is

    def serve(self, calls, answers):
        """Answers calls until there are no more to come. `calls`: a descriptor; `answers`: a text stream."""
        self.wires = calls, answers
        self.poll.register(calls, select.POLLIN)
        read = bytearray()
        while True:
            wait = None if not self.deadlines else max(0.0, next(iter(self.deadlines.values())) - time.monotonic())
            for descriptor, _ in self.poll.poll(wait and 1000.0 * wait):
                if descriptor != calls:
                    self.hear(self.numbers[descriptor])
                    continue
                chunk = os.read(calls, 1 << 20)
                if not chunk:
                    return
                read += chunk
                if b"\n" in chunk:
                    *lines, read = read.split(b"\n")
                    self.waiting.extend(map(json.loads, lines))
            now = time.monotonic()
            for number in [number for number, deadline in self.deadlines.items() if deadline <= now]:
                self.answer(number, {"error": f"it took longer than timeout_s = {self.step_s:g} s"})
            while self.waiting and len(self.deadlines) < self.at_once:
                self.begin(self.waiting.popleft())

    def begin(self, call):
        """Passes a call to its episode's process, or starts the process if the call is a reset."""
        number = call["episode"]
        ends = "reset" not in call and "step" not in call
        if ends and number in self.deadlines:
            self.answer(number, {})
            return
        self.deadlines[number] = time.monotonic() + self.step_s
        if "reset" in call:
            try:
                self.fork(number, call)
            except OSError as error:
                self.answer(number, {"error": f"no process can be started for it: {error.strerror}"})
        elif number not in self.episodes:
            self.answer(number, {} if ends else {"error": "its process has ended"})
        else:
            with contextlib.suppress(OSError):  # it is gone, which shows when it is listened to
                self.episodes[number][1].sendall(json.dumps(call).encode() + b"\n")

    def fork(self, number, call):
        """Forks the process of a new episode."""
        ours, theirs = socket.socketpair()
        parent, pid = os.getpid(), os.fork()
        if not pid:
            try:
                os.setsid()
                prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the host
                prctl(_SUBREAPER, 1)
                if os.getppid() == parent:
                    for descriptor in (*self.wires, ours, *(wire for _, wire, _ in self.episodes.values())):
                        os.close(descriptor if isinstance(descriptor, int) else descriptor.fileno())
                    self.live(call, theirs)
            finally:
                os._exit(0)
        theirs.close()
        ours.settimeout(self.step_s)
        self.episodes[number] = pid, ours, bytearray()
        self.numbers[ours.fileno()] = number
        self.poll.register(ours, select.POLLIN)

    def hear(self, number):
        """Reads an answer from an episode's process."""
        _, wire, read = self.episodes[number]
        chunk = b""
        with contextlib.suppress(OSError):
            chunk = wire.recv(1 << 20)
        read += chunk
        if not chunk:
            self.answer(number, {"error": self.bury(number)})
        elif chunk.endswith(b"\n"):
            self.answer(number, json.loads(bytes(read)))
            read.clear()

    def answer(self, number, said):
        """Answers an episode's pending call, if there is one. Ends the process of an episode that is over."""
        if number in self.episodes and ("observation" not in said or said.get("done")):
            self.bury(number)
        if self.deadlines.pop(number, None) is not None:
            print(json.dumps({"episode": number, **said}), file=self.wires[1], flush=True)

    def bury(self, number):
        """Kills an episode's process and every process that it started. Returns a sentence on how the process ended."""
        pid, wire, _ = self.episodes.pop(number)
        del self.numbers[wire.fileno()]
        self.poll.unregister(wire)
        wire.close()
        end(pid, os.killpg)
        end(pid, os.kill)  # it may not lead its group yet
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        known = self.shared | {each for each, _, _ in self.episodes.values()}
        while left := set(self.children(os.getpid())) - known:
            for each in left:
                end(each, os.kill)
                os.waitpid(each, 0)
        return f"it ended its process, with {'signal' if code < 0 else 'exit code'} {abs(code)}"

    # ---- in an episode's process ------------------------------------------------------------------------------------

    def live(self, call, wire):
        """Answers an episode's calls in its forked process, one by one, until the host closes the connection."""
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # where memory runs out, this process is ended, and not the trainer
        if "numpy" in sys.modules:  # or every episode draws the same; random does this by itself
            sys.modules["numpy"].random.seed()
        episode, lines = _Episode(self), wire.makefile("rb")
        while True:
            try:
                said = episode.answer(call)
            except BaseException as error:
                said = {"error": message_of(error)}
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):  # closed
                    stream.flush()
            wire.sendall(json.dumps(said).encode() + b"\n")
            line = lines.readline()
            if not line:
                return
            call = json.loads(line)


class _Episode:
    """One object of the environment, and its event loop."""

    def __init__(self, host):
        self.host, self.loop = host, asyncio.new_event_loop()
        asyncio.set_event_loop(self.loop)

    def answer(self, call):
        """{"observation"}, and behind a turn {"reward", "done"}; {} for a call that ends it."""
        if "reset" in call:
            self.environment = self.host.make(**self.host.options)
            return {"observation": said(self.run(self.environment.reset, call["reset"]), self.host.most)}
        if "step" in call:
            observation, reward, done = checked(self.run(self.environment.step, call["step"]))
            return {"observation": said(observation, self.host.most), "reward": reward, "done": done}
        self.run(getattr(self.environment, "close", tuple))
        return {}

    def run(self, method, *arguments):
        """Calls a method, plain or async."""
        found = method(*arguments)
        return self.loop.run_until_complete(found) if inspect.isawaitable(found) else found


def checked(returned):
    """Checks the return value of `step`: (observation, reward, done). Raises TypeError and ValueError."""
    try:
        observation, reward, done = returned
    except (TypeError, ValueError):
        raise TypeError(f"step has to return (observation, reward, done), not {returned!r:.100}") from None
    if isinstance(reward, str) or not abs(number := float(reward)) <= _LARGEST:
        raise ValueError(f"the reward is {reward!r:.100}; step has to return a number of at most {_LARGEST:g} in size")
    if done not in (True, False):
        raise TypeError(f"done is {done!r:.100}; step has to return True or False")
    return observation, number, bool(done)


def said(observation, most):
    """Cuts an observation (text or chat messages) to `most` characters. Raises TypeError for anything else."""
    if observation is None:
        return ""
    if isinstance(observation, str):
        return clean(observation[:most])
    if isinstance(observation, (list, tuple)) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in observation
    ):
        out = []
        for message in observation:
            content = clean(message["content"][:most])
            most -= len(content)
            out.append({"role": clean(message["role"]), "content": content})
        return out
    raise TypeError(f"an observation is text or a list of chat messages, not {type(observation).__name__}")


def clean(text):
    """Replaces lone surrogates in a text, which no tokenizer takes, by the replacement character."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def message_of(error):
    """Describes an exception in one line, with the file and line that raised it."""
    try:
        text = str(error)
    except BaseException:
        text = "its text cannot be had"
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__]
    where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
    return clean(f"{type(error).__name__}: {text}"[:400]) + where


def prctl(option, value):
    """Calls prctl(2), on systems that have it."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def end(pid, kill):
    """Kills a process or group; ignores one that is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)
