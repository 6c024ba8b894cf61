# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Plays episodes of an environment of the package `verifiers` (0.1.14). Loaded by path; imports nothing of qarl_jax.

    python qarl_jax/rollout/environments/_verifiers.py ID [--arguments JSON] > rows.jsonl       # its prompts

A verifiers environment runs a loop that calls a model; here the model is the policy. A call waits for the policy's
turn; the messages that the next call adds after this turn are the observation. When the loop ends, the environment's
rubric scores the episode: the reward of the last turn. Earlier turns have none.

Not supported, each an error of the episode: environments that rewrite the conversation between turns, score a group's
responses together, or offer tools by the model's API (the policy's turn is text, and the environment has to parse calls
out of it). Environments of 0.2 and later start programs that call a model by HTTP, and are not supported either.
"""

import argparse
import asyncio
import functools
import json
import sys


@functools.cache
def loaded(name, arguments):
    """Loads a verifiers environment, once per process: (the environment, its dataset's rows by example_id)."""
    import verifiers

    if not hasattr(verifiers, "load_environment"):
        raise RuntimeError(f"verifiers {verifiers.__version__} answers no policy: install verifiers==0.1.14")
    environment = verifiers.load_environment(name, **json.loads(arguments))
    if environment.requires_group_rollouts:
        raise RuntimeError(f"{name} scores the responses to a prompt together, which an episode by itself cannot")
    return environment, {row["example_id"]: row for row in environment.get_dataset()}


@functools.cache
def policy_type():
    """Makes the `verifiers` client class through which an environment asks the policy for a turn.

    The class is made in a function because `verifiers` is an optional dependency.
    """
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage

    class Policy(Client):
        """A client of verifiers. `take_turn`: coroutine function, messages -> the policy's text."""

        def __init__(self, take_turn):
            super().__init__(None)
            self.take_turn = take_turn

        async def get_response(self, prompt, model, sampling_args, tools=None, **kwargs):
            if tools:
                raise RuntimeError("it has tools that the model calls by its API; a policy's turn is text")
            text = await self.take_turn(prompt)
            message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
            return Response(id="turn", created=0, model=model, message=message)

        async def close(self):
            pass

        setup_client = to_native_tool = to_native_prompt = get_native_response = None
        raise_from_native_response = from_native_response = None

    return Policy


class Environment:
    """One episode of a verifiers environment. Args: id: the environment's name. arguments: of `load_environment`."""

    def __init__(self, id, arguments=None):
        self.id, self.arguments = id, json.dumps(arguments or {}, sort_keys=True)

    @classmethod
    def prepare(cls, id, arguments=None):
        loaded(id, json.dumps(arguments or {}, sort_keys=True))

    async def reset(self, task):
        self.environment, rows = loaded(self.id, self.arguments)
        row = rows[int(task["meta"]["example_id"])]
        self.calls: asyncio.Queue = asyncio.Queue()
        self.turns: asyncio.Queue = asyncio.Queue()

        async def take_turn(prompt):
            await self.calls.put([plain(message) for message in prompt])
            return await self.turns.get()

        policy = policy_type()(take_turn)
        self.rollout = asyncio.ensure_future(self.environment.rollout(row, policy, "policy", {}))
        self.conversation = [plain(message) for message in row["prompt"]]
        return await self.observation() or ""

    async def step(self, text):
        self.conversation.append({"role": "assistant", "content": text})
        await self.turns.put(text)
        observation = await self.observation()
        if observation is not None:
            return observation, 0.0, False
        state = self.rollout.result()
        await self.environment.rubric.score_rollout(state)
        await self.environment.rubric.cleanup(state)
        return "", state["reward"], True

    async def close(self):
        self.rollout.cancel()
        await asyncio.wait({self.rollout})

    async def observation(self):
        """Waits for the next model call; returns the messages it adds to the conversation. None: the loop ended."""
        call = asyncio.ensure_future(self.calls.get())
        await asyncio.wait({call, self.rollout}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            call.cancel()
            if error := self.rollout.result()["error"]:
                raise RuntimeError(f"{self.id}: {error!r}")
            return None
        prompt, known = call.result(), len(self.conversation)
        if prompt[:known] != self.conversation:
            self.rollout.cancel()
            raise RuntimeError(f"{self.id} rewrites the conversation between turns")
        self.conversation = prompt
        return prompt[known:]


def plain(message):
    """Converts a chat message to {"role", "content"}. Raises TypeError if the content is not text."""
    get = message.get if isinstance(message, dict) else functools.partial(getattr, message)
    content = get("content")
    if not isinstance(content, str):
        raise TypeError(f"a message's content is text, not {type(content).__name__}")
    return {"role": get("role"), "content": content}


def main():
    parser = argparse.ArgumentParser(description="The prompts of a verifiers environment, a JSON object per line.")
    parser.add_argument("id")
    parser.add_argument("--arguments", default="{}", help="of its load_environment, as JSON")
    args = parser.parse_args()
    for number, row in loaded(args.id, json.dumps(json.loads(args.arguments), sort_keys=True))[1].items():
        line = {"prompt": [plain(message) for message in row["prompt"]], "answer": str(row.get("answer", ""))}
        print(json.dumps(line | {"example_id": number}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
