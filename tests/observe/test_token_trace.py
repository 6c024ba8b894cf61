# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What samples.jsonl says of a token is what the update did with it: planted numbers come back, in packed rows and out.

In a run of two updates the first sees ratios of 1 and the second those of its own gradient program.
"""

import json
import math
import re

import jax
import numpy as np
import pytest

from qarl_jax import train
from qarl_jax.data import make_char_tokenizer, packing
from qarl_jax.data.tokenizer import pieces
from qarl_jax.loss import get_loss
from qarl_jax.loss.common import token_effects as tokens
from qarl_jax.metrics import Rows, merge, values
from qarl_jax.observe import recorder, token_trace
from qarl_jax.types import Prompt
from tests.reference import tiny
from tests.reference.rollouts import completion, group_of

pytestmark = pytest.mark.usefixtures("shared_learners")

KEPT, ABOVE, BELOW, REJECTED, NO_SIGNAL = range(len(tokens.FATES))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return make_char_tokenizer(tiny.ALPHABET, tmp_path_factory.mktemp("tokenizer"))


def make_groups(lengths, seed=0):
    """One group per inner list, responses of these lengths."""
    rng = np.random.default_rng(seed)
    groups = []
    for g, inner in enumerate(lengths):
        completions = tuple(
            completion(rng.integers(3, 20, size=n), -rng.uniform(0.1, 2.0, size=n), prompt=(4, 5)) for n in inner
        )
        prompt = Prompt(uid=f"g{g}", tokens=(4, 5), text="01", answer="")
        groups.append(group_of(completions, range(len(inner)), prompt=prompt))
    return groups


def follow(groups, picks, loss, moves, *, most=64, rows=4, micro_rows=2, epochs=1, old=True, tokenizer):
    """Two groups to an update; in update n the learner's log-probs are the sampler's plus moves[n]."""
    follower = token_trace.Follower(picks, loss, most=most, rows=rows)
    updates = [np.arange(i, i + 2) for _ in range(epochs) for i in range(0, len(groups), 2)]
    advantages = np.array([[1.0 if j % 2 else -1.0 for j in range(len(group.completions))] for group in groups])
    packs = []
    for chosen in updates:
        some = [groups[i] for i in chosen]
        packed = packing.pack(some, advantages[chosen], row_len=16, rows_multiple=micro_rows, max_segments=4)
        follower.packed(chosen, packed)
        packs.append(list(packed.micro_batches(micro_rows)))
    for number, micros in enumerate(packs):
        before = [micro.rollout_logprobs for micro in micros]
        now = [micro.rollout_logprobs + np.float32(moves[number]) for micro in micros]
        measured = {}
        for part in now:
            measured = merge(measured, {token_trace.LOGPROBS: Rows((part,))})
        follower.updated(number, micros, before if old else [None] * len(micros), measured.pop(token_trace.LOGPROBS))
    return follower.records(groups, tokenizer)


def test_planted_moves_come_back_as_ratios_and_fates_wherever_the_packing_put_them(tokenizer):
    groups = make_groups([[3, 5], [4, 4], [6, 2], [1, 7]])
    picks = [(0, 0), (1, 1), (2, 1), (3, 0)]
    loss = get_loss("tbpo", clip_high=0.02, neg_clip_low=0.02, neg_clip_high=0.02)
    got = follow(groups, picks, loss, [0.0, 0.1], tokenizer=tokenizer)
    assert sorted(got) == picks
    for (g, j), record in got.items():
        completion, columns = groups[g].completions[j], record["tokens"]
        second = g >= 2
        assert (record["update"], record["updates"]) == (2 if second else 1, 2)
        assert record["advantage"] == (1.0 if j % 2 else -1.0)
        assert record["seq_ratio"] == pytest.approx(math.exp(0.1 * second), rel=1e-5)
        assert columns["text"] == [tokenizer.decode([t]) for t in completion.tokens]
        np.testing.assert_allclose(columns["rollout"], completion.logprobs, rtol=1e-5)
        np.testing.assert_allclose(columns["old"], completion.logprobs, rtol=1e-5)
        np.testing.assert_allclose(columns["now"], completion.logprobs + 0.1 * second, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(columns["ratio"], math.exp(0.1 * second), rtol=1e-5)
        assert columns["mismatch"] == columns["weight"] == [1.0] * len(completion.tokens)
        assert columns["fate"] == [ABOVE if second else KEPT] * len(completion.tokens)
        assert record["cut"] == ({"above": len(completion.tokens)} if second else {})
        assert "left_out" not in columns


def test_token_level_objectives_judge_tokens_and_the_last_of_several_passes_counts(tokenizer):
    groups = make_groups([[8, 8], [8, 8]])
    got = follow(groups, [(0, 1)], get_loss("grpo"), [0.0, 0.5], epochs=2, tokenizer=tokenizer)[0, 1]
    assert got["update"] == 2
    assert got["tokens"]["fate"] == [ABOVE] * 8  # A > 0 and e^0.5 > 1.2
    got = follow(groups, [(0, 0)], get_loss("grpo"), [0.0, 0.5], epochs=2, tokenizer=tokenizer)[0, 0]
    assert got["tokens"]["fate"] == [KEPT] * 8  # A < 0: only the lower edge clips
    np.testing.assert_allclose(got["tokens"]["gain"], math.exp(0.5), rtol=1e-5)


def test_a_single_update_has_ratio_one_by_definition(tokenizer):
    groups = make_groups([[3, 5], [4, 4]])
    got = follow(groups, [(0, 0)], get_loss("tbpo"), [0.3], old=False, tokenizer=tokenizer)[0, 0]
    assert got["tokens"]["ratio"] == [1.0] * 3
    np.testing.assert_allclose(got["tokens"]["mismatch"], math.exp(0.3), rtol=1e-5)  # against the sampler


def test_of_a_long_response_head_and_tail_are_recorded_and_the_rest_counted(tokenizer):
    groups = make_groups([[9, 3], [2, 2]])
    got = follow(groups, [(0, 0), (0, 1)], get_loss("tbpo"), [0.0], most=5, tokenizer=tokenizer)
    text = [tokenizer.decode([t]) for t in groups[0].completions[0].tokens]
    assert got[0, 0]["tokens"]["text"] == [*text[:3], *text[-2:]]
    assert got[0, 0]["tokens"]["left_out"] == [3, 4]
    assert {len(v) for k, v in got[0, 0]["tokens"].items() if k != "left_out"} == {5}
    assert len(got[0, 1]["tokens"]["fate"]) == 3


def test_what_was_not_trained_on_or_not_wanted_has_no_record(tokenizer):
    groups = make_groups([[3, 0], [4, 4]])  # an emptied response takes no place in any row
    assert list(follow(groups, [(0, 0), (0, 1)], get_loss("tbpo"), [0.0], tokenizer=tokenizer)) == [(0, 0)]
    assert follow(groups, [(0, 0)], get_loss("tbpo"), [0.0], most=0, tokenizer=tokenizer) == {}
    assert token_trace.Follower([], get_loss("tbpo"), most=8, rows=0).records(groups, tokenizer) == {}


def test_records_are_json_even_where_numbers_are_not(tokenizer):
    groups = make_groups([[3, 5], [4, 4]])
    got = follow(groups, [(0, 0)], get_loss("grpo"), [math.inf], tokenizer=tokenizer)[0, 0]
    assert json.loads(json.dumps(got, allow_nan=False))["tokens"]["now"] == [None] * 3


def test_rows_are_strung_together_and_are_no_number():
    a, b = np.zeros((2, 3)), np.ones((2, 3))
    merged = merge({"x": Rows((a,))}, {"x": Rows((b,))})
    assert [part is given for part, given in zip(merged["x"].parts, (a, b), strict=True)] == [True, True]
    assert values(merged) == {}
    np.testing.assert_array_equal(merged["x"].value, np.concatenate([a, b]))
    assert len(jax.tree.leaves(merged)) == 2


# ---- which samples, and their text ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "limit"), [(64, 4), (9, 4), (3, 4), (4, 4), (5, 1), (0, 3)])
def test_picks_are_spread_over_the_step_and_end_with_its_last_group(count, limit):
    picks = recorder.picks(make_groups([[1, 1]] * count), limit)
    groups = [g for g, _ in picks]
    assert len(groups) == len(set(groups)) == min(count, limit)
    assert groups == sorted(groups)
    assert not groups or groups[-1] == count - 1
    gaps = np.diff([-1, *groups])
    assert not groups or max(gaps) - min(gaps) <= 1
    assert [j for _, j in picks] == [n % 2 for n in range(len(picks))]


@pytest.fixture(scope="module")
def bytes_tokenizer():
    """Byte-level, without merges: every byte a token, so that most characters take several."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(["<eos>", *alphabet])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")


@pytest.mark.parametrize("text", ["a b\n c", "né 語 🙂🙂 end", " ", ""])
def test_pieces_strung_together_are_the_text_and_a_character_belongs_to_its_last_byte(bytes_tokenizer, text):
    ids = bytes_tokenizer(text)["input_ids"]
    got = pieces(bytes_tokenizer, [*ids, 0])
    assert "".join(got) == text + "<eos>"
    assert len(got) == len(text.encode()) + 1
    at = 0
    for character in text:
        width = len(character.encode())
        assert got[at : at + width] == [""] * (width - 1) + [character]
        at += width


def test_garbage_bytes_are_shown_and_take_no_quadratic_time(bytes_tokenizer):
    stray = bytes_tokenizer("é")["input_ids"][:1]  # the first byte of two
    calls = []

    class Counting:
        def decode(self, tokens, **kwargs):
            calls.append(len(tokens))
            return bytes_tokenizer.decode(tokens, **kwargs)

    got = pieces(Counting(), stray * 300)
    assert "".join(got) == "\ufffd" * 300
    assert max(calls) <= 20


# ---- in a run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(compiled_programs, tmp_path_factory):
    world = tiny.World(tmp_path_factory.mktemp("world"))
    assert train.main(world.command()) == 0
    return world


@pytest.mark.slow
def test_ratios_are_one_in_a_steps_first_update_and_have_moved_in_its_second(run):
    samples = run.records("samples")
    assert [s["update"] for s in samples] == [1, 1, 2, 2] * 2
    moved = 0.0
    for sample in samples:
        columns = sample["tokens"]
        assert re.sub("<pad>|<eos>$", "", "".join(columns["text"])) == sample["response"]
        assert len({len(column) for column in columns.values()}) == 1
        assert len(columns["text"]) == sample["response_len"]
        np.testing.assert_allclose(columns["old"], columns["rollout"], atol=1e-5)  # one policy, two programs
        log = np.subtract(columns["now"], columns["old"])
        np.testing.assert_allclose(np.log(columns["ratio"]), log, atol=2e-5)
        assert math.log(sample["seq_ratio"]) == pytest.approx(log.mean(), abs=2e-5)
        if sample["update"] == 1:
            assert np.abs(log).max() < 1e-5
        else:
            moved = max(moved, np.abs(log).max())
    assert moved > 1e-3


@pytest.mark.slow
def test_fates_follow_the_band_of_the_run(run):
    seen = set()
    for sample in run.records("samples"):
        a, ratio = sample["advantage"], sample["seq_ratio"]
        fate = KEPT
        if a == 0:
            fate = NO_SIGNAL
        elif ratio > 1.02:
            fate = ABOVE
        elif ratio < 0.98 and a < 0:
            fate = BELOW
        assert set(sample["tokens"]["fate"]) == {fate}
        seen.add(fate)
    assert len(seen) > 1


@pytest.mark.slow
def test_switched_off_the_numbers_are_the_same_and_samples_have_no_tokens(run):
    off = run.changed(run_dir=str(run.folder / "off"), log={"sample_tokens": 0})
    assert train.main(off.command()) == 0
    for plain, traced in zip(off.records(), run.records(), strict=True):
        assert plain["reward/mean"] == traced["reward/mean"]
        assert plain["optim/grad_norm"] == pytest.approx(traced["optim/grad_norm"], rel=1e-5)
    for plain, traced in zip(off.records("samples"), run.records("samples"), strict=True):
        assert "tokens" in traced
        assert plain.items() <= traced.items()
        assert plain.keys() == traced.keys() - {
            "advantage",
            "update",
            "updates",
            "seq_ratio",
            "seq_mismatch",
            "cut",
            "tokens",
        }
