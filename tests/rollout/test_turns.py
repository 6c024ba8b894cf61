# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Responses of several turns: what is drawn, what is observed, what is trained on, and when one ends."""

import contextlib
import dataclasses
import json
import re

import numpy as np
import pytest

from qarl_jax import data, models, train
from qarl_jax.data import packing
from qarl_jax.loop import updates
from qarl_jax.loop.step_metrics import rollout_metrics
from qarl_jax.observe import error_tokens, recorder, run_data
from qarl_jax.observe.run_data import RunData
from qarl_jax.rewards import Grader, environment, exact, total
from qarl_jax.rollout import PolicyWeights, Request, RolloutEngine, SamplingConfig, dynamic_sampling, turns
from qarl_jax.rollout.environments import Calculator, Custom
from qarl_jax.rollout.turns import TurnTaking
from qarl_jax.rollout.vllm import engine as vllm
from qarl_jax.run import config
from qarl_jax.types import Prompt, Turn, UserError, VersionSpan
from tests.reference import tiny
from tests.reference.rollouts import completion

pytestmark = pytest.mark.usefixtures("shared_learners")

EOS = 1
CHAT = "{% for m in messages %}{% if m.role != 'nobody' %}{{ m.content }}<eos>{% endif %}{% endfor %}"
# One point for every turn; fails at "9".
POINTS = """
class Points:
    async def reset(self, task):
        return task["meta"].get("first", "")
    async def step(self, text):
        if text == "9":
            raise ValueError("nine")
        return "+", 1.0, text == "0"
"""
# Rewards a call, and speaks as nobody to whoever makes none.
HEARS = """
class Hears:
    async def reset(self, task):
        self.turns = 0
        return ""
    async def step(self, text):
        self.turns += 1
        if text == "c":
            return [{"role": "nobody", "content": "c"}], 0.0, False
        return "c", float(text.startswith("<tool>")), self.turns == 2
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return data.make_char_tokenizer("0123456789*=[]+abcdefghijklmnopqrstuvwxyz<>\n ", tmp_path_factory.mktemp("t"))


class Engine(RolloutEngine):
    """Says the texts of `script[uid]`, one a turn; a turn that ends in "..." has no stop token."""

    order = staticmethod(iter)

    def __init__(self, tokenizer, script, version=0):
        self.tokenizer, self.script, self.version, self.asked = tokenizer, script, version, []

    def draw(self, requests, *, sampling):
        self.asked.append(requests)
        for index, request in self.order(list(enumerate(requests))):
            turn = len(self.asked) - 1
            text = self.script[request.prompt.uid][turn]
            cut = text.endswith("...")
            tokens = [*self.tokenizer.encode(text.removesuffix("...")), *([] if cut else [EOS])]
            one = completion(
                tokens[: request.max_tokens],
                -0.5 - np.arange(len(tokens))[: request.max_tokens],
                prompt=request.prompt.tokens,
                finish_reason="length" if cut or len(tokens) > request.max_tokens else "stop",
                version=self.version + turn,
            )
            yield index, one

    def close(self):
        self.closed = True


class BackwardEngine(Engine):
    order = staticmethod(reversed)


@pytest.fixture(params=[Engine, BackwardEngine])
def play(request, tokenizer, tmp_path):
    """play(script, cfg=..., limit=...) -> ({uid: completion}, engine); cfg None: POINTS."""
    (tmp_path / "points.py").write_text(POINTS)
    with contextlib.ExitStack() as stack:

        def played(script, cfg=None, limit=40, samples=1, log=print, meta=None, **settings):
            cfg = cfg or Custom(path=f"{tmp_path}/points.py:Points", before="", after="", **settings)
            engine = request.param(tokenizer, script)
            turns = stack.enter_context(contextlib.closing(TurnTaking(engine, cfg, tokenizer, chat=False, log=log)))
            prompts = [
                Prompt(uid=uid, tokens=tuple(tokenizer.encode("ab=")), text="ab=", answer="42", meta=meta or {})
                for uid in script
            ]
            found = turns.generate(
                prompts,
                num_samples=samples,
                sampling=SamplingConfig(max_response_len=limit, stop_token_ids=(EOS,)),
                key=5,
            )
            return dict(zip(script, (group[0] for group in found), strict=True)), engine

        yield played


def text(tokenizer, tokens):
    return tokenizer.decode(list(tokens)).replace("<eos>", "$")


def test_turns_are_drawn_behind_the_very_tokens_before_them(play, tokenizer):
    found, engine = play({"a": ["[6*7]", "42"]}, Calculator(opening="[", closing="]", before="", after="="))
    one = found["a"]
    assert text(tokenizer, one.tokens) == "[6*7]$42=42$"
    assert one.turns == (Turn(start=0, end=6), Turn(start=9, end=12))
    np.testing.assert_array_equal(one.drawn, [1] * 6 + [0] * 3 + [1] * 3)
    assert [(s.version, s.start, s.end) for s in one.versions] == [(0, 0, 6), (1, 9, 12)]
    np.testing.assert_array_equal(one.logprobs, [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5, 0, 0, 0, -0.5, -1.5, -2.5])
    assert one.finish_reason == "stop"
    (first,), (second,) = engine.asked
    assert (first.number, first.key, first.tokens, first.max_tokens) == (0, 5, (), 40)
    assert (second.tokens, second.max_tokens) == (one.tokens[:9], 31)


def test_a_response_ends_when_the_environment_is_done_or_a_limit_is_hit(play, tokenizer):
    script = {"done": ["1", "0"], "turns": ["1", "2", "3"], "cut": ["1..."]}
    found, _ = play(script, max_turns=3)
    assert {uid: one.finish_reason for uid, one in found.items()} == {
        "done": "stop",
        "turns": "length",
        "cut": "length",
    }
    assert [turn.reward for turn in found["turns"].turns] == [1, 1, 1]
    assert text(tokenizer, found["turns"].tokens) == "1$+2$+3$"  # nothing is observed behind the last turn
    assert found["cut"].turns == (Turn(start=0, end=1),)  # of a turn that was cut off the environment hears nothing


def test_turns_and_observations_share_the_limit_of_a_response(play, tokenizer):
    found, engine = play({"a": ["12345", "6789"]}, limit=8)
    assert text(tokenizer, found["a"].tokens) == "12345$+6"
    assert found["a"].finish_reason == "length"
    assert [request.max_tokens for (request,) in engine.asked] == [8, 1]
    found, _ = play({"a": ["123456", "7"]}, limit=8)
    assert text(tokenizer, found["a"].tokens) == "123456$"  # no room for a turn behind what is observed
    found, engine = play({"a": ["12", "3"]}, limit=8, max_turn_len=2)
    assert text(tokenizer, found["a"].tokens) == "12"  # without a stop token: a turn at its own limit is the last


def test_what_an_environment_says_first_goes_before_the_first_turn(play, tokenizer):
    found, engine = play({"a": ["0"]}, meta={"first": "xy"})
    assert text(tokenizer, found["a"].tokens) == "xy0$"
    assert found["a"].turns == (Turn(start=2, end=4, reward=1.0),)
    assert engine.asked[0][0].tokens == found["a"].tokens[:2]


def test_an_episode_whose_environment_fails_is_left_out(play):
    said = []
    found, _ = play({"good": ["0"], "bad": ["9"]}, log=said.append)
    assert (found["bad"].finish_reason, found["bad"].tokens, found["bad"].turns) == ("abort", (), ())
    assert found["good"].finish_reason == "stop"
    (line,) = said
    assert re.fullmatch(
        r"environment .*/points.py:Points failed in 1 of 2 episodes; first prompt bad, turn 1: ValueError: nine"
        r" \(points.py, line 7\)\. Their responses are left out\.",
        line,
    )
    with pytest.raises(
        UserError, match=r"failed in 1 of 1 episodes; first prompt bad, turn 1: ValueError: nine.*Mend it"
    ):
        play({"bad": ["9"]})


@pytest.mark.slow
def test_an_environment_that_stops_the_process_of_all_cannot_stop_the_run(play, tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "_NOTICE_S", 0.5)
    (tmp_path / "stops.py").write_text(
        POINTS.replace('raise ValueError("nine")', "os.kill(os.getppid(), 19)") + "import os\n"
    )
    cfg = Custom(path=f"{tmp_path}/stops.py:Points", timeout_s=1.0)
    with pytest.raises(UserError, match=r"failed in 1 of 1 .* the process that holds all episodes was ended"):
        play({"bad": ["9"]}, cfg)
    assert play({"good": ["0"]}, cfg)[0]["good"].finish_reason == "stop"


def test_copies_of_a_prompt_go_on_counting_and_groups_keep_their_order(play):
    _, engine = play({"a": ["0"], "b": ["0"]}, samples=2)
    assert [(r.prompt.uid, r.number) for r in engine.asked[0]] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


def test_the_environment_hears_the_tags_that_are_special_tokens_and_what_it_cannot_go_on_with_costs_its_episode(
    tokenizer, tmp_path
):
    tagged = data.make_char_tokenizer("abc", tmp_path, chat_template=CHAT, extra_tokens=("<tool>",))
    (tmp_path / "hears.py").write_text(HEARS)
    cfg = Custom(path=f"{tmp_path}/hears.py:Hears")
    prompts = [Prompt(uid=uid, tokens=(3,), text="", answer="") for uid in ("tool", "other")]
    engine, said = Engine(tagged, {"tool": ["<tool>a", "b"], "other": ["c"]}), []
    with contextlib.closing(TurnTaking(engine, cfg, tagged, chat=True, log=said.append)) as turns:
        sampling = SamplingConfig(max_response_len=40, stop_token_ids=(EOS,))
        (tool,), (other,) = turns.generate(prompts, num_samples=1, sampling=sampling, key=0)
    assert [turn.reward for turn in tool.turns] == [1.0, 0.0]
    assert other.finish_reason == "abort"
    assert "prompt other, turn 1: " in said[0]
    assert "role 'nobody'" in said[0]


# ---- what is made of it ---------------------------------------------------------------------------------------------


def graded(tokenizer, completions, reward):
    prompt = Prompt(uid="a", tokens=(3, 4), text="6*7=", answer="42")
    groups, parts = Grader(reward, max_response_len=40).grade(tokenizer, [prompt], [completions])
    return groups[0], parts


def response(tokenizer, *turns, rewards=()):
    """Turns with the observation "42=" between them."""
    tokens, places = [], []
    for number, said in enumerate(turns):
        tokens += tokenizer.encode("42=") if number else []
        start = len(tokens)
        tokens += [*tokenizer.encode(said), EOS]
        reward = rewards[number] if rewards else 0.0
        places.append(Turn(start=start, end=len(tokens), reward=reward))
    return dataclasses.replace(completion(tokens, prompt=(3, 4)), turns=tuple(places))


def test_the_last_turn_is_the_answer_and_not_what_was_observed(tokenizer):
    right, observed = response(tokenizer, "[6*7]", "42"), response(tokenizer, "[6*7]", "dunno")
    group, _ = graded(tokenizer, [right, observed], exact.Config(extract="last_number"))
    assert group.rewards.tolist() == [1, 0]
    assert [turn.reward for turn in group.completions[0].turns] == [0, 1]  # the last turn has it
    assert "42" in group.texts[1]  # in full, for the record


def test_rewards_of_the_environment_add_up_over_turns_and_stay_with_them(tokenizer):
    terms = (
        total.Term(reward=exact.Config(extract="last_number")),
        total.Term(reward=environment.Config(), coef=0.5),
    )
    one = response(tokenizer, "[6*7]", "42", rewards=(1.0, -3.0))
    group, parts = graded(tokenizer, [one], total.Config(terms=terms))
    assert parts["environment"].tolist() == [-2.0]
    assert group.rewards.tolist() == [0.0]
    assert [turn.reward for turn in group.completions[0].turns] == [0.5, -0.5]


def test_turns_of_a_mix_have_the_rewards_of_their_own_part_alone(tokenizer):
    last, own = exact.Config(extract="last_number"), environment.Config()
    one = response(tokenizer, "[6*7]", "42", rewards=(1.0, 2.0))
    for part, rewards, expected in (
        ("b", {"a": own, "b": own}, [1.0, 2.0]),
        ("a", {"a": last, "b": own}, [0.0, 1.0]),  # nothing of the environment's
        ("b", {"a": last, "b": own}, [1.0, 2.0]),
    ):
        prompt = Prompt(uid="a", tokens=(3, 4), text="6*7=", answer="42", meta={"mix_part": part})
        (group,), _ = Grader(total.BySource(rewards=rewards), max_response_len=40).grade(tokenizer, [prompt], [[one]])
        assert [turn.reward for turn in group.completions[0].turns] == expected


def test_observed_tokens_are_masked_from_the_loss_and_count_nowhere(tokenizer):
    group, _ = graded(tokenizer, [response(tokenizer, "[6*7]", "42"), response(tokenizer, "7")], environment.Config())
    packed = packing.pack([group], np.array([[[2.0, 3.0], [5.0, 0.0]]]), row_len=20)
    first = packed.segments[0]
    row = packed.batch.loss_mask[first.row, first.response]
    np.testing.assert_array_equal(row, [True] * 6 + [False] * 3 + [True] * 3)
    np.testing.assert_array_equal(packed.batch.advantages[first.row, first.response], [2.0] * 6 + [0.0] * 3 + [3.0] * 3)
    assert (packed.num_tokens, packed.num_sequences) == (9 + 2, 2)
    assert packed.batch.advantages.sum() == 6 * 2 + 3 * 3 + 2 * 5
    same = packing.pack([group], np.array([[2.0, 5.0]]), row_len=20)  # one number for all turns
    np.testing.assert_array_equal(same.batch.advantages[first.row, first.response][row], np.full(9, 2.0))
    numbers = rollout_metrics([group], {}, np.zeros((1, 2, 2)), tokenizer)
    assert (numbers["response/length_mean"], numbers["turns/mean"], numbers["turns/observed_tokens"]) == (5.5, 1.5, 1.5)
    assert numbers["reward/zero_advantage_groups"] == 1


def test_repetitions_are_those_of_the_policy_in_responses_that_did_not_fail(tokenizer):
    said = response(tokenizer, "[6*7]", "42")  # between the turns: an observation of one token, 40 times
    (first, last), gap = said.turns, 40
    tokens = (*said.tokens[: first.end], *[9] * gap, *said.tokens[last.start :])
    moved = Turn(start=first.end + gap, end=len(tokens))
    episode = dataclasses.replace(said, tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), turns=(first, moved))
    failed = dataclasses.replace(dynamic_sampling.emptied(said), finish_reason="abort")
    group, _ = graded(tokenizer, [episode, failed], environment.Config())
    numbers = rollout_metrics([group], {}, None, tokenizer)
    assert (numbers["text/repeated"], numbers["text/loops"], numbers["turns/observed_tokens"]) == (0, 0, gap)
    drawn = tokenizer.decode([token for turn in episode.turns for token in tokens[turn.start : turn.end]][:-1])
    assert numbers["text/zlib_ratio"] == error_tokens.zlib_ratio(drawn)  # the last token ends the response


def test_an_episode_that_failed_enters_no_statistic_of_its_group(tokenizer):
    right, wrong = response(tokenizer, "[6*7]", "42"), response(tokenizer, "7")
    failed = dataclasses.replace(dynamic_sampling.emptied(wrong), finish_reason="abort")
    group, parts = graded(tokenizer, [right, wrong, failed, wrong], exact.Config(extract="last_number"))
    assert group.rewards.tolist() == [1, 0, 0, 0]
    newer = [
        dataclasses.replace(one, versions=(VersionSpan(version=7, start=0, end=2),)) for one in group.completions[:2]
    ]
    of_all = dataclasses.replace(group, completions=(*newer, failed), rewards=group.rewards[:3], texts=group.texts[:3])
    numbers, without = (
        rollout_metrics(
            [dataclasses.replace(of_all, completions=of_all.completions[:n], rewards=of_all.rewards[:n])],
            {},
            None,
            tokenizer,
        )
        for n in (3, 2)
    )
    assert numbers["rollout/version"] == 7
    assert (numbers["reward/mean"], numbers["turns/failed"]) == (0.5, 1 / 3)
    left = {key: value for key, value in numbers.items() if not key.startswith("turns/")}
    assert left == {key: value for key, value in without.items() if not key.startswith("turns/")}
    none = dataclasses.replace(of_all, completions=(failed,) * 3)
    assert "rollout/version" not in rollout_metrics([none], {}, None, tokenizer)
    cfg = config.load(tiny.ROOT / "configs/quickstart.yaml", ["advantage.name=drgrpo"])
    _, advantages = updates.advantages_of(cfg, [group])
    np.testing.assert_allclose(advantages, [[2 / 3, -1 / 3, 0, -1 / 3]], rtol=1e-6)
    by_turn = ["advantage.level=turn", "loss.name=grpo", "rollout.environment.name=calculator"]
    cfg = config.load(tiny.ROOT / "configs/quickstart.yaml", ["advantage.name=drgrpo", *by_turn])
    _, advantages = updates.advantages_of(cfg, [group])
    np.testing.assert_allclose(advantages[0, :, 0], [2 / 3, -1 / 3, 0, -1 / 3], rtol=1e-6)
    assert advantages[0, :, 1].tolist() == [0, 0, 0, 0]  # nobody else has a second turn
    same, parts = graded(tokenizer, [right, failed], exact.Config(extract="last_number"))
    assert dynamic_sampling.informative([same], parts).tolist() == [False]


def test_samples_and_the_report_show_turns(tokenizer, tmp_path):
    group, _ = graded(tokenizer, [response(tokenizer, "[6*7]", "42", rewards=(0.25, 1))], environment.Config())
    (record,) = recorder.sample_records([group], 1, tokenizer=tokenizer)
    assert record["turns"] == [
        {"text": "[6*7]", "observation": "42=", "reward": 0.25, "tokens": 6},
        {"text": "42", "observation": "", "reward": 1.0, "tokens": 3},
    ]
    names = ["rollout", "old", "now", "ratio", "mismatch", "weight", "gain"]
    columns = {name: [0.5] * 9 for name in names} | {"text": [*"[6*7]$", *"42$"], "fate": [0] * 9}
    trace = {"advantage": 1.0, "update": 1, "updates": 1, "seq_ratio": 1.0, "seq_mismatch": 1.0, "cut": {}}
    for name, extra in (("whole", {"tokens": columns} | trace), ("bare", {})):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "samples.jsonl").write_text(json.dumps({"step": 0, **record, **extra}) + "\n")
        (row,) = RunData(folder, "run", steps=1).part({})[0]["samples"]["rows"]
        full = row["full"]
        assert full["turns"] == record["turns"]
        assert {"whole": full["observed"] == {6: "42="}, "bare": not full["tokens"]}[name]
        assert {"whole": "".join(full["tokens"]), "bare": full["response"]}[name].startswith("[6*7]")


def test_an_observation_is_shown_where_it_was_made_also_where_tokens_are_left_out():
    turns = [{"tokens": 3, "observation": "x"}, {"tokens": 6, "observation": "y"}, {"tokens": 1, "observation": ""}]
    assert run_data.observed(turns, 10, 0) == {3: "x", 9: "y"}
    assert run_data.observed(turns, 2, 6) == {2: "x", 3: "y"}  # of tokens 0 to 9, 2 to 7 are left out


# ---- over a bridge --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_over_a_bridge_a_turn_is_a_request_with_all_that_came_before_it(tmp_path):
    alphabet = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ012345+=<"
    tokenizer = data.make_char_tokenizer(alphabet, tmp_path)
    (tmp_path / "points.py").write_text(POINTS)
    weights = models.random_model(tiny.model_config(vocab_size=len(tokenizer), hidden_size=64), 0)
    graphdef, params, _ = models.split(weights)
    published = PolicyWeights(graphdef=graphdef, params=params, qweights=models.quantizer(graphdef)(params))
    # The engine behind the bridge draws by a hash of context and seed; a third of the tokens ends a turn.
    sampling = SamplingConfig(max_response_len=40, stop_token_ids=tuple(range(0, 64, 3)))
    engine = vllm.VllmEngine(vllm.Config(engine="fake", max_model_len=128, start_timeout_s=120))
    cfg = Custom(path=f"{tmp_path}/points.py:Points", before="", after="", max_turns=3)
    prompts = [Prompt(uid=str(i), tokens=(5, 6, 7 + i), text="", answer="") for i in range(4)]
    with contextlib.closing(TurnTaking(engine, cfg, tokenizer, chat=False)) as turns:
        turns.publish(published, 0)
        assert turns.version == 0
        groups = turns.generate(prompts, num_samples=4, sampling=sampling, key=3)
        again = turns.generate(prompts, num_samples=4, sampling=sampling, key=3)
        for group, same in zip(groups, again, strict=True):
            assert [one.tokens for one in group] == [one.tokens for one in same]
        several = [(i, j, one) for i, g in enumerate(groups) for j, one in enumerate(g) if len(one.turns) == 3]
        assert several
        for i, j, one in several[:3]:
            for turn in one.turns:
                request = Request(prompt=prompts[i], number=j, key=3, tokens=one.tokens[: turn.start], max_tokens=40)
                (drawn,) = engine.extend([request], sampling=sampling)
                assert drawn.tokens == one.tokens[turn.start : turn.end]
                np.testing.assert_array_equal(drawn.logprobs, one.logprobs[turn.start : turn.end])


# ---- a run ----------------------------------------------------------------------------------------------------------

ECHO = """
class Echo:
    async def reset(self, task):
        return ""
    async def step(self, text):
        return "+" + text[:2], 0.5, "3" in text
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of three steps, whose episodes have up to three turns."""
    folder = tmp_path_factory.mktemp("turns")
    (folder / "echo.py").write_text(ECHO)
    world = tiny.World(folder).changed(
        run_dir=str(folder / "whole"),
        rollout={
            "max_response_len": 16,
            "environment": {
                "name": "custom",
                "path": f"{folder}/echo.py:Echo",
                "max_turns": 3,
                "before": "",
                "after": "",
            },
        },
        reward={"name": "sum", "terms": [{"reward": {"name": "environment"}}, {"reward": {"name": "exact"}}]},
        advantage={"name": "grpo", "level": "turn"},
        loss={"name": "grpo"},
        train={"steps": 3},
    )
    assert train.main(world.command()) == 0
    return world


@pytest.mark.slow
def test_a_run_of_several_turns_scores_what_was_drawn(whole):
    for record in whole.records():
        assert record["turns/max"] > 1
        assert record["turns/observed_tokens"] > 0
        assert record["turns/failed"] == 0
        assert record["mismatch/max_abs"] < 1e-3  # what was observed is context for both, in the same places
        assert record["train/tokens"] == record["response/tokens"]
    assert any(turn["observation"] for record in whole.records("samples") for turn in record["turns"])


@pytest.mark.nightly
def test_a_run_of_several_turns_resumes_to_the_same_bits(whole, tmp_path, monkeypatch):
    real, calls = updates.Updates.run, []

    def dying(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    monkeypatch.setattr(updates.Updates, "run", dying)
    victim = whole.changed(run_dir=str(tmp_path / "killed"))
    with pytest.raises(KeyboardInterrupt):
        train.main(victim.command())
    assert train.main(victim.command()) == 0
    for name in ("metrics", "eval", "samples"):
        assert victim.records(name) == whole.records(name)
