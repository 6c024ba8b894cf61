# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Partial rollouts: when a step stops, what it keeps and how long, and that a killed run goes on with it."""

import dataclasses
import json

import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.data import PromptStream
from qarl_jax.loop import setup
from qarl_jax.rollout import SamplingConfig, dynamic_sampling, partial_rollouts
from qarl_jax.rollout.embedded.engine import Config as SamplerConfig
from qarl_jax.rollout.embedded.engine import JaxSampler
from qarl_jax.rollout.partial_rollouts import Buffer, Config
from qarl_jax.run import on_disk
from qarl_jax.run.checkpoint import Checkpoints
from qarl_jax.types import UserError, VersionSpan
from tests.reference import tiny
from tests.reference.numbered import Source
from tests.reference.rollouts import completion, group_of
from tests.reference.tiny_policies import VOCAB, policy, prompts

pytestmark = pytest.mark.usefixtures("shared_learners")

OFF = dynamic_sampling.Config()
LIMIT = 10


class Engine:
    """Response j of prompt i has `length(i, j)` tokens; token t is t, its log-prob -version - t/100."""

    def __init__(self, length):
        self.length, self.version, self.asked = length, 0, []

    def __call__(self, requests):
        self.asked.append([(r.prompt.uid, r.number, len(r.tokens), r.max_tokens, r.key) for r in requests])
        out = []
        for request in requests:
            start = len(request.tokens)
            assert request.tokens == tuple(range(start))  # what it goes on with is what it said
            whole = self.length(int(request.prompt.uid), request.number)
            end = min(start + request.max_tokens, whole)
            out.append(
                completion(
                    range(start, end),
                    [-self.version - t / 100 for t in range(start, end)],
                    prompt=request.prompt.tokens,
                    finish_reason="stop" if end == whole else "length",
                    version=self.version,
                )
            )
        return out


class Grader:
    """Rewards (0, 1) where `useful(i)`, else (0, 0); remembers what it graded."""

    def __init__(self, useful=lambda i: True):
        self.useful, self.graded = useful, []

    def __call__(self, prompts, completions):
        self.graded += [int(prompt.uid) for prompt in prompts]
        groups = [
            group_of(own, (0, self.useful(int(prompt.uid))), prompt=prompt)
            for prompt, own in zip(prompts, completions, strict=True)
        ]
        return groups, {"exact": np.concatenate([group.rewards for group in groups])}


class Run:
    """Steps of a scripted run over 4 prompts each, 2 samples per prompt, at most 10 tokens."""

    def __init__(self, length, dynamic=OFF, useful=lambda i: True, size=400, **config):
        self.cfg = Config(**{"over_provision": 1.5, "chunk": 2} | config)
        self.dynamic = dynamic
        self.stream = PromptStream(Source(size), seed=7, prompts_per_step=4)
        self.engine, self.grader = Engine(length), Grader(useful)
        self.buffer = Buffer()

    def step(self, step, limit=LIMIT):
        self.engine.version, self.engine.asked, self.grader.graded = step, [], []
        got, self.buffer = partial_rollouts.collect(
            self.cfg,
            self.dynamic,
            self.stream,
            step,
            self.buffer,
            num_samples=2,
            max_response_len=limit,
            key=lambda begun: 1000 + begun,
            extend=self.engine,
            grade=self.grader,
        )
        return got

    def order(self, start, count):
        return self.stream.positions(start, count)


def two_slow():
    """(run, its slow prompts): 9 tokens in one response of the second and fifth prompt, 3 in every other."""
    slow = []
    run = Run(lambda i, j: 9 if i in slow and j == 1 else 3)
    slow += [run.order(0, 6)[1], run.order(0, 6)[4]]
    return run, slow


def uids(groups):
    return [int(group.prompt.uid) for group in groups]


def responses(groups):
    return [response for group in groups for response in group.completions]


# ---- when a step stops, and what it keeps ---------------------------------------------------------------------------


def test_a_step_stops_at_the_look_where_it_has_its_groups_and_keeps_the_others():
    run, slow = two_slow()
    got = run.step(0)
    # Two looks of 2 tokens: whoever needs 3 is done; the two slow ones are not waited for.
    assert len(run.engine.asked) == 2
    assert len(run.engine.asked[0]) == 12
    assert len(run.engine.asked[1]) == 12
    assert uids(got.groups) == [i for i in run.order(0, 6) if i not in slow]
    assert all(r.finish_reason == "stop" and len(r.tokens) == 3 for r in responses(got.groups))
    assert [group.index for group in run.buffer.groups] == slow
    assert [r.finish_reason for g in run.buffer.groups for r in g.responses] == ["stop", "abort"] * 2
    assert [len(r.tokens) for g in run.buffer.groups for r in g.responses] == [3, 4] * 2
    assert got.metrics == {
        "rollout/partial_rounds": 2,
        "rollout/partial_tokens": 4 * 2 * 3 + 2 * (3 + 4),
        "rollout/partial_continued": 0,
        "rollout/partial_buffered": 2,
        "rollout/lag_mean": 0,
        "rollout/lag_max": 0,
    }
    assert uids(got.sampled) == run.grader.graded == uids(got.groups)  # nothing else was graded
    assert got.parts["exact"].tolist() == [0, 1] * 4


def test_the_next_step_goes_on_with_them_first_and_fills_up_from_the_stream():
    run, slow = two_slow()
    run.step(0)
    got = run.step(1)
    first = run.engine.asked[0]
    new = run.order(6, 4)
    # Only what is unfinished is asked for, with the key of the step it was begun in.
    assert first[:2] == [(str(i), 1, 4, 2, 1000) for i in slow]
    assert first[2:] == [(str(i), j, 0, 2, 1001) for i in new for j in (0, 1)]
    # Four new ones are complete before the old ones are, so these wait once more.
    assert uids(got.groups) == new
    assert got.metrics["rollout/partial_continued"] == 2
    got = run.step(2)
    assert uids(got.groups)[:2] == slow  # the oldest first, complete at 9 = 4 + 4 + 1 tokens
    assert len(run.engine.asked) == 2
    assert run.buffer.begun == 14


def test_versions_and_log_probs_are_those_of_the_version_that_drew_each_token():
    run, _ = two_slow()
    run.step(0), run.step(1)
    got = run.step(2)
    fast, mixed = got.groups[0].completions
    assert mixed.tokens == tuple(range(9))
    assert mixed.versions == (
        VersionSpan(version=0, start=0, end=4),
        VersionSpan(version=1, start=4, end=8),
        VersionSpan(version=2, start=8, end=9),
    )
    want = [-v - t / 100 for v, t in zip([0] * 4 + [1] * 4 + [2], range(9), strict=True)]
    np.testing.assert_array_equal(mixed.logprobs, np.array(want, np.float32))
    assert mixed.logprobs.dtype == np.float32
    assert mixed.finish_reason == "stop"
    assert fast.versions == (VersionSpan(version=0, start=0, end=3),)
    assert got.metrics["rollout/lag_max"] == 2
    drawn = [3 * 2, 3 * 2, 4 * 2 + 4, 4 * 2 + 4]  # token times lag: two fast, two mixed; the new ones have lag 0
    assert got.metrics["rollout/lag_mean"] == pytest.approx(sum(drawn) / (2 * (3 + 9) + 2 * 6))


def test_a_response_at_the_limit_is_cut_off_and_complete():
    run = Run(lambda i, j: 99 if j else 10)
    got = run.step(0)
    assert [r.finish_reason for r in responses(got.groups)] == ["stop", "length"] * 4
    assert {len(r.tokens) for r in responses(got.groups)} == {10}
    assert {r[3] for asked in run.engine.asked for r in asked} == {2}
    # The last piece is what is left of the limit, and a limit that has come down ends what has reached it.
    odd = Run(lambda i, j: 99, chunk=4)
    odd.step(0)
    assert [asked[0][3] for asked in odd.engine.asked] == [4, 4, 2]
    shrunk, slow = two_slow()
    shrunk.step(0)
    got = shrunk.step(1, limit=4)
    assert uids(got.groups)[:2] == slow
    assert [(r.finish_reason, len(r.tokens)) for r in responses(got.groups[:2])] == [("stop", 3), ("length", 4)] * 2
    # Rows are as long as the new limit: longer responses are cut, complete ones too.
    cut, slow = two_slow()
    cut.step(0)
    got = cut.step(1, limit=2)
    assert uids(got.groups)[:2] == slow
    for response in responses(got.groups):
        assert (response.finish_reason, response.tokens, len(response.logprobs)) == ("length", (0, 1), 2)
        assert [(span.start, span.end) for span in response.versions][-1][1] == 2


def test_complete_groups_that_were_not_needed_are_trained_on_without_being_sampled_again():
    run = Run(lambda i, j: 2, over_provision=2.0)
    got = run.step(0)
    assert uids(got.groups) == run.order(0, 8)[:4]
    got = run.step(1)
    assert uids(got.groups) == run.order(0, 8)[4:]
    assert run.engine.asked == []
    assert got.metrics["rollout/partial_rounds"] == got.metrics["rollout/partial_tokens"] == 0
    assert got.metrics["rollout/lag_mean"] == 1
    assert run.buffer == Buffer(begun=8)


def test_a_step_leaves_the_buffer_it_was_given_as_it_was():
    run, _ = two_slow()
    run.step(0)
    before, state = run.buffer, run.buffer.state()
    one = run.step(1)
    assert before.state() == state
    run.buffer = before  # an interrupt drops the step; the resumed run repeats it
    again = run.step(1)
    assert uids(one.groups) == uids(again.groups)


@pytest.mark.parametrize("max_lag", [1, 2, 3])
def test_no_group_is_older_than_the_bound_when_it_is_trained_on(max_lag):
    run = Run(lambda i, j: 200 if i % 5 == 0 else 1 + i % 4, max_lag=max_lag, over_provision=1.75, chunk=1)
    ages, seen = [], []
    for step in range(12):
        before = {group.index: group.step for group in run.buffer.groups}
        got = run.step(step, limit=40)
        assert len(got.groups) == 4
        seen += uids(got.groups)
        ages += [step - before.get(uid, step) for uid in uids(got.groups)]
        assert all(step - group.step < max_lag for group in run.buffer.groups)
    assert max(ages) == max_lag  # the bound is reached, and held
    assert len(seen) == len(set(seen))  # no prompt is lost, none is trained on twice
    left = [group.index for group in run.buffer.groups]
    assert sorted(seen + left) == sorted(run.order(0, run.buffer.begun))


def test_two_copies_of_a_prompt_in_a_step_draw_differently():
    run = Run(lambda i, j: 3, size=4, over_provision=2.0)
    run.step(0)
    numbers = [(uid, number) for uid, number, *_ in run.engine.asked[0]]
    assert len(numbers) == len(set(numbers)) == 16
    assert {number for _, number in numbers} == {0, 1, 2, 3}


def test_an_engine_that_adds_nothing_is_an_error_and_not_an_endless_loop():
    run = Run(lambda i, j: 0)
    with pytest.raises(RuntimeError, match="added no token"):
        run.step(0)


# ---- with dynamic sampling ------------------------------------------------------------------------------------------


def test_groups_without_a_signal_make_room_for_new_ones():
    dynamic = dynamic_sampling.Config(max_batches=10)
    run = Run(lambda i, j: 3, dynamic, useful=lambda i: i % 2)
    got = run.step(0)
    assert all(i % 2 for i in uids(got.groups))
    asked = run.order(0, run.buffer.begun)
    idle = [i for i in asked if i % 2 == 0]
    assert sorted(run.grader.graded) == sorted(asked)  # each once
    assert set(uids(got.sampled)) == {*uids(got.groups), *idle}
    assert got.metrics["rollout/groups_dropped"] == pytest.approx(len(idle) / len(got.sampled))
    assert got.metrics["rollout/groups_filled"] == 0
    assert got.metrics["rollout/batches"] == run.buffer.begun / 4
    assert [group.index for group in run.buffer.groups] == [i for i in asked if i % 2][4:]
    with pytest.raises(UserError, match="no such term"):
        Run(lambda i, j: 3, dynamic_sampling.Config(max_batches=2, metric="accuracy")).step(0)


def test_dynamic_sampling_keeps_its_bound_and_fills_the_step_up():
    run = Run(lambda i, j: 3 + i % 5, dynamic_sampling.Config(max_batches=3), useful=lambda i: False)
    got = run.step(0)
    assert run.buffer == Buffer(begun=12)
    assert len(got.groups) == 4
    assert len(got.sampled) == len(got.parts["exact"]) // 2 == 12
    assert got.metrics["rollout/groups_filled"] == got.metrics["rollout/groups_dropped"] == 1
    assert got.metrics["rollout/batches"] == 3


# ---- checkpoints ----------------------------------------------------------------------------------------------------


def test_the_buffer_comes_back_from_a_checkpoint_to_the_bit():
    run, _ = two_slow()
    run.step(0), run.step(1)
    state = json.loads(json.dumps(run.buffer.state(), allow_nan=False))
    back = partial_rollouts.restore(run.cfg, state, run.stream, 2, 2)
    assert any(len(r.versions) == 2 for g in back.groups for r in g.responses)
    assert back.state() == run.buffer.state()
    for group, other in zip(back.groups, run.buffer.groups, strict=True):
        assert (group.name, group.prompt) == (other.name, other.prompt)
        for one, two in zip(group.responses, other.responses, strict=True):
            np.testing.assert_array_equal(one.logprobs.view(np.uint32), two.logprobs.view(np.uint32))
            for field in ("prompt_tokens", "tokens", "finish_reason", "versions"):
                assert getattr(one, field) == getattr(two, field)
    # and the run goes on with it as it would have
    want, after = run.step(2), run.buffer
    run.buffer = back
    got = run.step(2)
    assert uids(got.groups) == uids(want.groups)
    assert run.buffer.state() == after.state()


def test_a_checkpoint_that_does_not_fit_the_run_is_refused():
    run, _ = two_slow()
    run.step(0)
    state = run.buffer.state()
    with pytest.raises(UserError, match=r"cannot resume: .* partial rollouts have begun, and rollout\.partial is off"):
        partial_rollouts.restore(Config(), state, run.stream, 1, 2)
    with pytest.raises(UserError, match=r"groups of 2 responses, and rollout\.num_samples_per_prompt is 4"):
        partial_rollouts.restore(run.cfg, state, run.stream, 1, 4)
    assert partial_rollouts.restore(run.cfg, None, run.stream, 5, 2) == Buffer(
        begun=20
    )  # turned on in the middle of a run
    assert partial_rollouts.restore(Config(), None, run.stream, 5, 2) == Buffer(begun=20)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"over_provision": 0.9}, r"over_provision must lie in \[1, 2\]"),
        ({"over_provision": 2.5}, "max_lag could not be kept"),
        ({"over_provision": 1.5, "chunk": -1}, "chunk must not be negative"),
        ({"over_provision": 1.5, "max_lag": 0}, "max_lag must be at least 1"),
        ({"chunk": 16}, "decides nothing at over_provision=1"),
    ],
)
def test_settings_that_cannot_be_are_refused(fields, sentence):
    with pytest.raises(UserError, match=sentence):
        Config(**fields)


def test_numbers_are_resolved():
    assert Config(over_provision=1.1).groups(10) == 11  # 11.000000000000002
    assert Config(over_provision=1.3).groups(4) == 6
    assert Config(over_provision=1.5).tokens(100) == 13
    assert Config(over_provision=1.5, chunk=7).tokens(100) == 7
    assert Config(over_provision=1.5, chunk=7).tokens(5) == 5


# ---- with the embedded sampler --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_interrupted_response_becomes_what_it_would_have_become():
    """Token for token: pieces of 4 tokens, over prompts of many lengths, against one call of `generate`."""
    engine = JaxSampler(SamplerConfig(batch_size=8, min_slots=8, prompt_bucket=32, response_bucket=16))
    engine.publish(policy("w4a16"), 0)
    stops = tuple(range(0, VOCAB, 5))
    sampling = SamplingConfig(max_response_len=14, stop_token_ids=stops)
    stream = PromptStream(Source(12), seed=0, prompts_per_step=4)
    asked = prompts(12)
    stream.source.prompt = lambda i: asked[i]
    cfg, buffer, found, cut = Config(over_provision=2.0, chunk=4), Buffer(), {}, 0
    for step in range(2):
        got, buffer = partial_rollouts.collect(
            cfg,
            OFF,
            stream,
            step,
            buffer,
            num_samples=4,
            max_response_len=14,
            key=lambda begun: 77,
            extend=lambda requests: engine.extend(requests, sampling=dataclasses.replace(sampling, max_response_len=4)),
            grade=lambda prompts, completions: (
                [group_of(c, prompt=p) for p, c in zip(prompts, completions, strict=True)],
                {"x": np.zeros(4 * len(prompts))},
            ),
        )
        found |= {group.prompt.uid: group.completions for group in got.groups}
        cut += sum(r.finish_reason == "abort" for group in buffer.groups for r in group.responses)
    assert cut > 0  # something was left for another step
    named = [prompt for prompt in asked if prompt.uid in found]
    whole = engine.generate(named, num_samples=4, sampling=sampling, key=77)
    assert {c.finish_reason for group in whole for c in group} == {"stop", "length"}
    for prompt, group in zip(named, whole, strict=True):
        for mine, theirs in zip(found[prompt.uid], group, strict=True):
            assert mine.tokens == theirs.tokens
            assert (mine.finish_reason, mine.versions) == (theirs.finish_reason, theirs.versions)
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-5)


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Four steps; the policy seldom stops by itself, so the limit does what stopping does elsewhere."""
    return tiny.World(tmp_path_factory.mktemp("world")).changed(
        rollout={"partial": {"over_provision": 1.75, "chunk": 4, "max_lag": 2}},
        train={"steps": 4},
        eval={"at_start": False, "at_end": False},
    )


@pytest.fixture(scope="module")
def run(world):
    assert train.main(world.command()) == 0
    return world


@pytest.mark.slow
def test_a_run_trains_on_responses_of_several_versions(run):
    lines = run.records()
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert {line["train/updates"] for line in lines} == {2}
    keys = {f"rollout/partial_{name}" for name in ("rounds", "tokens", "continued", "buffered")}
    assert all(keys | {"rollout/lag_mean", "rollout/lag_max"} <= line.keys() for line in lines)
    assert lines[0]["rollout/lag_max"] == lines[0]["rollout/partial_continued"] == 0
    assert sum(line["rollout/partial_continued"] for line in lines) > 0
    assert 0 < max(line["rollout/lag_max"] for line in lines) <= 2
    assert lines[0]["mismatch/max_abs"] < 1e-5  # all of one version: the sampler's policy is the learner's
    for line in lines[1:]:  # and an older version is another policy
        assert (line["mismatch/max_abs"] > 1e-4) == (line["rollout/lag_max"] > 0)
        assert line["rollout/version"] == line["step"] - line["rollout/lag_max"]


def unfinished(changed):
    """Unfinished responses in the newest checkpoint."""
    checkpoints = Checkpoints(changed.run_dir / "checkpoints")
    kept = on_disk.load_json(checkpoints.path(checkpoints.steps()[-1]), "extra.json")["partial"]["groups"]
    return sum(response["finish_reason"] == "abort" for group in kept for response in group["responses"])


def assert_ends_as(changed, whole):
    assert train.main(changed.command()) == 0
    assert changed.records() == whole.records()
    assert changed.records("samples") == whole.records("samples")


@pytest.mark.nightly
def test_a_run_that_is_stopped_and_started_again_ends_as_if_it_had_not(run):
    changed = run.changed(run_dir=str(run.folder / "cut"))
    # The learning rate is constant, so a shorter run is the beginning of a longer one.
    assert train.main(changed.command("train.steps=3")) == 0
    assert unfinished(changed) > 0
    assert_ends_as(changed, run)


@pytest.mark.slow
def test_a_step_dropped_by_an_interrupt_is_sampled_again_from_what_was_in_hand(run, monkeypatch):
    changed = run.changed(run_dir=str(run.folder / "interrupted"), checkpoint={"every": 0})
    collect, interrupts = partial_rollouts.collect, []

    class Interrupt(setup.Interrupt):
        def __init__(self):
            super().__init__()
            interrupts.append(self)

    def interrupted(cfg, dynamic, stream, step, *args, **options):
        interrupts[0].requested = step == 3
        return collect(cfg, dynamic, stream, step, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(setup, "Interrupt", Interrupt)
        patch.setattr(partial_rollouts, "collect", interrupted)
        assert train.main(changed.command()) == 0
    assert len(changed.records()) == 3
    assert unfinished(changed) == run.records()[2]["rollout/partial_buffered"] > 0
    assert_ends_as(changed, run)


@pytest.mark.nightly
def test_a_run_over_the_bridge_goes_on_with_its_responses_too(world, monkeypatch):
    """The engine behind the bridge is the fake one: its tokens are a hash, of which every third one ends a response."""
    monkeypatch.setattr(setup.data, "stop_token_ids", lambda tokenizer, path: tuple(range(10)))
    engine = {"name": "vllm", "engine": "fake", "max_model_len": 24, "start_timeout_s": 60}
    rollout = world.tree["rollout"] | {"engine": engine}
    whole = world.changed(run_dir=str(world.folder / "bridge"), rollout=rollout)
    assert train.main(whole.command()) == 0
    lines = whole.records()
    assert sum(line["rollout/partial_continued"] for line in lines) > 0
    assert 0 < max(line["rollout/lag_max"] for line in lines) <= 2
    changed = whole.changed(run_dir=str(world.folder / "bridge_cut"))
    cut = next(line["step"] + 1 for line in lines if line["rollout/partial_buffered"])
    assert train.main(changed.command(f"train.steps={cut}")) == 0
    assert unfinished(changed) > 0
    assert_ends_as(changed, whole)


@pytest.mark.slow
def test_a_run_cannot_drop_what_it_has_begun(run, capsys):
    capsys.readouterr()
    assert train.main(run.command("train.steps=5", "rollout.partial.over_provision=1", "rollout.partial.chunk=0")) == 2
    assert "rollout.partial is off" in capsys.readouterr().err
