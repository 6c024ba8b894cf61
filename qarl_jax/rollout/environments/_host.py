# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Episodes in a process of their own; run by `rewards/_worker.py`, and imports nothing of qarl_jax.

A task is a list of calls, which are answered at the same time: {"episode": number, "reset": task} begins an episode,
{"episode": number, "step": text} takes a turn, {"episode": number} ends it. What an environment raises, and a call that
takes too long, ends its episode with an "error", and no other.
"""

import asyncio
import inspect
import math


class Host:
    """The episodes of one process.

    Args:
      make: the environment's class; called with `options` for every episode.
      options: keyword arguments.
      step_s: seconds that a call may take.
    """

    def __init__(self, make, options, step_s):
        self.make, self.options, self.step_s = make, options, step_s
        self.episodes = {}
        self.loop = asyncio.new_event_loop()

    def answer(self, task):
        """One answer per call: {"observation", "reward", "done"}, or {"error"}."""

        async def together():
            return await asyncio.gather(*map(self.call, task["calls"]))

        return self.loop.run_until_complete(together())

    async def call(self, call):
        number = call["episode"]
        try:
            if "reset" in call:
                self.episodes[number] = environment = self.make(**self.options)
                return {"observation": said(await self.within(environment.reset, call["reset"]))}
            if "step" not in call:
                environment = self.episodes.pop(number, None)
                close = getattr(environment, "close", None)
                if close is not None:
                    await self.within(close)
                return {}
            if number not in self.episodes:
                return {"error": "the process that held it was ended"}
            observation, reward, done = await self.within(self.episodes[number].step, call["step"])
            if not math.isfinite(reward):
                raise ValueError(f"the reward is {reward}")
            return {"observation": said(observation), "reward": float(reward), "done": bool(done)}
        except TimeoutError:
            error = f"it took longer than {self.step_s:g} s"
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"[:400]
        self.episodes.pop(number, None)
        return {"error": error}

    async def within(self, function, *arguments):
        """The result. A plain function runs in a thread, which is left where it is when it takes too long."""
        if inspect.iscoroutinefunction(function):
            return await asyncio.wait_for(function(*arguments), self.step_s)
        return await asyncio.wait_for(asyncio.to_thread(function, *arguments), self.step_s)


def said(observation):
    """Text, or chat messages. Raises TypeError for anything else."""
    if observation is None:
        return ""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, (list, tuple)) and all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
        for m in observation
    ):
        return [{"role": m["role"], "content": m["content"]} for m in observation]
    raise TypeError(f"an observation is text or a list of chat messages, not {type(observation).__name__}")
