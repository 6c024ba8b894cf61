# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""A judge over a real HTTP server: scores, retries, cache and budget; nothing becomes 0 in silence."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from qarl_jax import data
from qarl_jax.rewards import Sample, judge
from qarl_jax.types import Prompt, UserError
from tests.reference import reward_servers, tiny


@pytest.fixture
def endpoint():
    with reward_servers.serving() as server:
        yield server


def sample(text, question="How?", finish="stop"):
    said = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": question})
    prompt = Prompt(uid="p", tokens=(1,), text="-", answer="so", messages=said)
    return Sample(prompt=prompt, text=text, num_tokens=1, finish_reason=finish)


def reward(endpoint, **more):
    return judge.Reward(judge.Config(url=endpoint.url, model="m", **more), 8)


def test_the_last_score_counts_within_0_and_1_and_equal_requests_are_sent_once(endpoint, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    samples = [sample(f"worth {n}") for n in (7, 7, 12, -3, "nothing")]
    found = reward(endpoint, extra={"seed": 3}).score([*samples, sample(""), sample("worth 9", finish="length")])
    # Without a number of its own the reply's last score is the first one, of 1.
    assert found.tolist() == pytest.approx([0.7, 0.7, 1.0, 0.0, 0.1, 0.0, 0.0])
    assert len(endpoint.bodies) == 4
    path, body = endpoint.bodies[0]
    assert (path, body["model"], body["seed"]) == ("/v1/chat/completions", "m", 3)
    text = body["messages"][0]["content"]
    assert "[Question]\nHow?\n" in text
    assert "[Reference answer]\nso\n" in text
    assert endpoint.keys == ["Bearer secret"] * 4


def test_a_busy_endpoint_is_asked_again_and_one_that_stays_busy_stops_the_run(endpoint):
    endpoint.failures.extend([503, 429])
    assert reward(endpoint).score([sample("worth 5")]).tolist() == [0.5]
    assert len(endpoint.bodies) == 3
    endpoint.failures.extend([500] * 2)
    with pytest.raises(UserError, match=r"failed 2 times, at last with HTTP 500: .*busy"):
        reward(endpoint, retries=1).score([sample("worth 5")])
    endpoint.failures.append(401)
    with pytest.raises(UserError, match="refuses a request: HTTP 401"):
        reward(endpoint).score([sample("worth 5")])
    assert len(endpoint.bodies) == 6
    with pytest.raises(UserError, match="failed 1 times, at last with URLError"):
        judge.Reward(judge.Config(url="http://127.0.0.1:9", model="m", retries=0), 8).score([sample("x")])


THOUGHT = {"message": {"content": None, "reasoning_content": "Hm. Score: 9"}, "finish_reason": "length"}
SILENT = {"message": {"content": " \n"}, "finish_reason": "stop"}
SCORELESS = {"message": {"content": "Good work."}, "finish_reason": "stop"}
CUT = {"message": {"content": "I begin with"}, "finish_reason": "length"}


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        (THOUGHT, r"a reply without content, cut off by max_tokens; raise reward\.max_tokens, or turn the judge's"),
        (SILENT, r"a reply without content; see what the judge answers"),
        (CUT, r"a reply without a score, which ends in 'I begin with', cut off by max_tokens; raise"),
    ],
)
def test_a_reply_without_content_or_that_is_cut_off_is_a_failure_that_no_cache_keeps(endpoint, tmp_path, choice, says):
    file = tmp_path / "judge.jsonl"
    endpoint.choices.extend([choice] * 2)
    with pytest.raises(UserError, match=rf"failed 2 times, at last with {says}"):
        reward(endpoint, cache=str(file), retries=1).score([sample("worth 5")])
    assert not file.exists()
    endpoint.choices.append(choice)
    asked = reward(endpoint, cache=str(file))
    assert asked.score([sample("worth 5")]).tolist() == [0.5]
    assert asked.replies.tokens == 20  # the failed reply's are paid for, too
    assert reward(endpoint, cache=str(file)).score([sample("worth 5")]).tolist() == [0.5]
    assert len(endpoint.bodies) == 4


def test_a_whole_reply_without_a_score_is_asked_for_again_and_then_gives_0_with_a_warning(endpoint):
    endpoint.choices.extend([SCORELESS] * 2)
    asked = reward(endpoint, retries=1)
    with pytest.warns(UserWarning, match=r"a reply without a score, which ends in 'Good work\.'; .*reward is 0"):
        assert asked.score([sample("worth 5")]).tolist() == [0]
    assert (len(endpoint.bodies), asked.replies.tokens) == (2, 20)
    assert asked.score([sample("worth 5")]).tolist() == [0.5]


def test_replies_without_a_score_in_a_cache_are_asked_for_again(endpoint, tmp_path):
    file = tmp_path / "judge.jsonl"
    reward(endpoint, cache=str(file)).score([sample("worth 5")])
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text": ""}) + "\n")
    assert reward(endpoint, cache=str(file)).score([sample("worth 5")]).tolist() == [0.5]


@pytest.mark.parametrize(
    ("reply", "best", "score"),
    [
        ("Score: 9", 10, 0.9),
        ("Score: 2\n**Score:** 9 - 2 errors", 10, 0.9),
        ("Score: 10/10", 10, 1.0),
        ("Score (0-10): 9", 10, 0.9),
        ("Score [0 \u2013 10] = 7.5", 10, 0.75),
        ("Score (10 is perfect): 9", 10, 0.9),
        ("Final score out of 10: 9", 10, 0.9),
        ("Score on a scale of 0 to 10: 9", 10, 0.9),
        ("Score (0.0-1.0): 0.25", 1, 0.25),
        ("Score (9)\n\n3 errors", 10, 0.9),
        ("Score: N, from 0 to 10", 10, None),
        ("9 of 10 points", 10, None),
    ],
)
def test_the_scale_is_not_the_score(reply, best, score):
    assert judge.score_in(reply, best) == score


def test_the_cache_answers_after_a_restart_and_the_budget_counts_it(endpoint, tmp_path):
    file = str(tmp_path / "deep" / "judge.jsonl")
    first = [sample("worth 4"), sample("worth 6")]
    assert reward(endpoint, cache=file).score(first).tolist() == pytest.approx([0.4, 0.6])
    with open(file, "a") as lines:
        lines.write('{"key": "cut of')  # a process was killed
    reward(endpoint, cache=file).score([*first, sample("worth 8")])  # goes on behind what is whole
    again = reward(endpoint, cache=file, budget_requests=3)
    assert again.score(first).tolist() == pytest.approx([0.4, 0.6])
    assert len(endpoint.bodies) == 3
    with pytest.raises(UserError, match=r"budget_requests=3, of which 0 are left, and a batch needs 1"):
        again.score([*first, sample("worth 1")])
    tokens = reward(endpoint, cache=file, budget_tokens=30)
    with pytest.raises(UserError, match=r"budget_tokens=30, and replies took 30"):
        tokens.score([sample("worth 1")])
    assert len(endpoint.bodies) == 3


def test_a_wrong_setting_is_told_before_a_policy_is_sampled(endpoint, tmp_path):
    with pytest.raises(UserError, match="must be an endpoint such as"):
        judge.Config(url="localhost:8000", model="m")
    with pytest.raises(UserError, match=r"reward\.prompt"):
        reward(endpoint, prompt="{{ question")
    (tmp_path / "other.txt").write_text("hello\n")
    with pytest.raises(UserError, match=r"other.txt:1: no line of a judge's cache"):
        reward(endpoint, cache=str(tmp_path / "other.txt"))


@pytest.mark.vllm
@pytest.mark.nightly
def test_a_live_vllm_judges(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    chat = "{% for m in messages %}{{ m.content }}{% endfor %}"
    data.make_char_tokenizer(tiny.ALPHABET, folder, chat_template=chat)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
    options = ["--host", "127.0.0.1", "--served-model-name", "m", "--max-model-len", "128", "--enforce-eager"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1"}
    with (tmp_path / "log").open("wb") as log:
        server = subprocess.Popen([*served, *options], stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and server.poll() is None:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.5)
        asked = {"url": f"http://127.0.0.1:{port}/v1", "model": "m", "max_tokens": 8, "retries": 0}
        with pytest.raises(UserError, match="failed 1 times, at last with a reply without"):  # the model knows no words
            judge.Reward(judge.Config(prompt="{{ response }}", **asked), 8).score([sample("1+2=")])
        # The server puts the request in front of the reply.
        echo = {"echo": True, "add_generation_prompt": False}
        made = judge.Reward(judge.Config(prompt="Score: 7, {{ response }}", extra=echo, **asked), 8)
        assert made.score([sample("a b")]).tolist() == pytest.approx([0.7])
        (reply,) = made.replies.known.values()
        assert reply.tokens > 4  # of the request, and some of the reply
    finally:
        os.killpg(server.pid, 9)
        server.wait()
