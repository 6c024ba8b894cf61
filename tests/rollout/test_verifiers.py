# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Environments of the package verifiers (0.1.14), where it is installed: `pip install verifiers==0.1.14`.

Needs nothing of qarl_jax, so that it runs in an environment of its own:
`python -m pytest tests/rollout/test_verifiers.py --noconftest`.
"""

import base64
import json
import pathlib
import pickle
import subprocess
import sys

import pytest

verifiers = pytest.importorskip("verifiers")
if not hasattr(verifiers, "load_environment"):
    pytest.skip("another verifiers than 0.1", allow_module_level=True)
ROLLOUT = pathlib.Path(__file__).parents[2] / "qarl_jax" / "rollout" / "environments"
# A number is to be guessed, with a hint after every miss; three turns at most.
GUESS = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        guess = messages[-1].content
        if guess == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "yes"}]
            return state["final_env_response"]
        if guess == "crash":
            raise vf.Error("the dice fell off the table")
        return [{"role": "user", "content": "higher" if int(guess) < int(state["answer"]) else "lower"}]

async def found(completion, answer, **kwargs):
    said = [m.content if hasattr(m, "content") else m["content"] for m in completion]
    return float(answer in said)

def load_environment(largest=9, **rest):
    rows = [{"question": f"1 to {largest}?", "answer": str(n)} for n in range(1, largest + 1)]
    return Guess(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=3,
                 system_prompt="Guess.", **rest)
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """host(*calls) -> their answers, as rewards/_worker.py serves them."""
    folder = tmp_path_factory.mktemp("guess")
    (folder / "guess.py").write_text(GUESS)
    options = {"id": "guess", "arguments": {"largest": 5}}
    setup = (
        [str(folder), *sys.path],
        str(ROLLOUT / "_host.py"),
        f"{ROLLOUT}/_verifiers.py:Environment",
        options,
        20,
        1000,
    )
    command = [sys.executable, str(ROLLOUT.parents[1] / "rewards/_worker.py"), "environment", "20", "0"]
    command.append(base64.b64encode(pickle.dumps(setup)).decode())
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert json.loads(process.stdout.readline()) == {"ready": True}

        def ask(*calls):
            process.stdin.writelines(json.dumps(call).encode() + b"\n" for call in calls)
            process.stdin.flush()
            found = [json.loads(process.stdout.readline()) for _ in calls]
            by_episode = {answer.pop("episode"): answer for answer in found}
            return [by_episode[call["episode"]] for call in calls]

        yield ask
        process.stdin.close()


def play(host, episode, number, *turns):
    (begun,) = host({"episode": episode, "reset": {"meta": {"example_id": number}}})
    return [begun, *(host({"episode": episode, "step": turn})[0] for turn in turns)]


def test_the_environments_own_loop_answers_and_its_rubric_scores(host):
    begun, lower, yes = play(host, 1, 2, "4", "3")  # example 2 is the number 3
    assert not begun["observation"]
    assert lower == {"observation": [{"role": "user", "content": "lower"}], "reward": 0.0, "done": False}
    assert (yes["reward"], yes["done"]) == (1.0, True)


def test_its_limit_of_turns_ends_the_episode_with_its_score(host):
    *_, last = play(host, 2, 0, "5", "4", "3")
    assert (last["reward"], last["done"]) == (0.0, True)


def test_episodes_side_by_side_do_not_see_each_other(host):
    host(*({"episode": e, "reset": {"meta": {"example_id": e % 5}}} for e in (10, 11, 12)))
    found = host(*({"episode": e, "step": "2"} for e in (10, 11, 12)))  # the numbers 1, 2 and 3
    assert [one["done"] for one in found] == [False, True, False]
    assert [one["observation"][0]["content"] for one in (found[0], found[2])] == ["lower", "higher"]


def test_what_fails_in_an_environment_is_the_episodes_error(host):
    *_, failed = play(host, 3, 0, "crash")
    assert "the dice fell off the table" in failed["error"]
    play(host, 4, 0, "5")
    assert host({"episode": 3}, {"episode": 4}) == [{}, {}]  # one that is over, and one that is cut short


def test_its_prompts_are_rows_of_a_file(tmp_path):
    (tmp_path / "guess.py").write_text(GUESS)
    command = [sys.executable, str(ROLLOUT / "_verifiers.py"), "guess", "--arguments", '{"largest": 2}']
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(tmp_path), "HOME": "/tmp"})
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["answer"] for row in rows] == ["1", "2"], done.stderr
    assert rows[1]["prompt"] == [{"role": "system", "content": "Guess."}, {"role": "user", "content": "1 to 2?"}]
    assert [row["example_id"] for row in rows] == [0, 1]
