# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: the likelihood of the answers rises, and the result is a model folder."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from qarl_jax import data, models, sft
from qarl_jax.run import build, export
from qarl_jax.typed_config import load
from qarl_jax.types import LossInputs, Prompt, UserError
from tests.reference import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sft")
    tiny.data_file(folder / "sums.jsonl")
    return folder


def tree(folder, out, **sections):
    """A run from random weights over sums of digits."""
    return {
        "out": str(folder / out),
        "model": {
            "init": {
                "architectures": ["Qwen3ForCausalLM"],
                "model_type": "qwen3",
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
                "max_position_embeddings": 64,
                "rms_norm_eps": 1e-6,
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
                "hidden_act": "silu",
            }
        },
        "tokenizer": {"alphabet": tiny.ALPHABET},
        "data": {"source": {"name": "jsonl", "path": str(folder / "sums.jsonl")}, "template": "raw", "holdout": 0.0},
        "train": {"updates": 30, "rows": 16, "row_len": 8, "log_every": 1},
        "optimizer": {"name": "adamw", "lr": 0.01},
    } | sections


def run(folder, values, *arguments, name="sft.yaml"):
    path = folder / name
    path.write_text(yaml.safe_dump(values))
    return sft.main(["--config", str(path), *arguments])


@pytest.fixture(scope="module")
def trained(folder):
    """(folder of the result, lines printed)."""
    import contextlib
    import io

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert run(folder, tree(folder, "base")) == 0
    return folder / "base", said.getvalue().splitlines()


def likelihoods(lines):
    return [float(line.split("nll ")[1].split()[0]) for line in lines if line.startswith("sft ")]


def test_the_solution_before_a_final_answer_is_imitated():
    prompt = Prompt(uid="a", tokens=(1,), text="q", answer="3", meta={"whole_answer": "1+2=3\n#### 3"})
    assert sft.own_answers([prompt], np.random.default_rng(0)) == ["1+2=3\n#### 3"]


@pytest.mark.slow
def test_the_likelihood_of_the_answers_rises(trained):
    losses = likelihoods(trained[1])
    assert len(losses) == 30
    assert losses[0] == pytest.approx(np.log(30), rel=0.2)  # small random weights: uniform over 30 tokens
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.slow
def test_the_result_is_a_model_folder_with_tokenizer_and_receipt(trained):
    out, _ = trained
    model = models.load_hf(out, dtype="float32")
    assert (model.config.num_layers, model.config.vocab_size) == (1, 30)
    tokenizer = data.load_tokenizer(out)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    prompt = tokenizer("3+4=")["input_ids"]
    logits = np.asarray(model(jnp.asarray([prompt], jnp.int32)))[0, -1]
    assert tokenizer.decode([logits.argmax()]).isdigit()  # it has learned what answers are made of
    assert not out.with_name("base.partial").exists()
    assert "fingerprint" in json.loads((out / "sft.json").read_text())


@pytest.mark.slow
def test_an_equal_config_is_not_trained_again_and_another_one_is(folder, trained, capsys):
    before = (folder / "base" / "model.safetensors").stat().st_mtime_ns
    assert run(folder, tree(folder, "base")) == 0
    assert "up to date" in capsys.readouterr().out
    assert (folder / "base" / "model.safetensors").stat().st_mtime_ns == before
    assert run(folder, tree(folder, "base"), "train.updates=1") == 0
    assert "wrote" in capsys.readouterr().out
    assert (folder / "base" / "model.safetensors").stat().st_mtime_ns > before


@pytest.mark.slow
def test_a_folder_is_trained_further_through_low_bit_weights(folder, capsys):
    model = tiny.model_folder(folder / "start")
    values = tree(
        folder, "further", model={"path": str(model)}, quant="w4a16:g32", optimizer={"name": "muon", "lr": 0.02}
    )
    del values["tokenizer"]
    assert run(folder, values, name="further.yaml") == 0
    losses = likelihoods(capsys.readouterr().out.splitlines())
    assert losses[-1] < 0.6 * losses[0]
    assert models.load_hf(folder / "further", dtype="float32").config.hidden_size == 64
    assert data.load_tokenizer(folder / "further")("1+")["input_ids"] == [4, 13]


def test_a_gradient_that_is_not_finite_between_two_lines_is_told(folder, monkeypatch, capsys):
    whole, calls, bad = sft.Learner.update, [], "optim/nonfinite"

    def update(self, *args):
        state, measured = whole(self, *args)
        calls.append(None)
        return state, measured | ({bad: jax.tree.map(jnp.ones_like, measured[bad])} if len(calls) == 2 else {})

    monkeypatch.setattr(sft.Learner, "update", update)
    assert run(folder, tree(folder, "diverged"), "train.updates=4", "train.log_every=100", name="diverged.yaml") != 0
    assert "update 1: the loss is" in capsys.readouterr().err
    assert len(calls) == 4
    assert not (folder / "diverged").exists()


def test_rows_hold_prompt_and_answer_and_only_the_answer_counts():
    batch = sft.rows_of([((5, 6, 7, 1), (False, False, True, True)), ((8, 9, 9, 1), (False, True, True, True))], 6)
    np.testing.assert_array_equal(batch.tokens, [[5, 6, 7, 1, 0, 0], [8, 9, 9, 1, 0, 0]])
    np.testing.assert_array_equal(batch.positions, [[0, 1, 2, 3, 0, 0]] * 2)
    np.testing.assert_array_equal(batch.segment_ids, [[1, 1, 1, 1, 0, 0]] * 2)
    np.testing.assert_array_equal(batch.loss_mask, [[0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]])
    with pytest.raises(UserError, match=r"5 tokens, but train.row_len is 4"):
        sft.rows_of([(range(5), [True] * 5)], 4)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ('{"messages": [{"role": "user", "content": "3+4="}]}', "error: prompt asked/61 has no answer to imitate: "),
        ('{"prompt": "3+4=", "answer": "7 ?"}', "error: prompt asked/61: its answer has characters that"),
    ],
)
def test_a_row_whose_answer_cannot_be_imitated_is_refused(folder, capsys, row, said):
    good = '{"prompt": "1+2=", "answer": "3"}\n'
    (folder / "asked.jsonl").write_text(60 * good + row)  # one update reads one row of 61
    values = tree(folder, "asked", train={"updates": 1, "rows": 1, "row_len": 8})
    values["data"]["source"]["path"] = str(folder / "asked.jsonl")
    assert run(folder, values, name="asked.yaml") == 2
    assert said in capsys.readouterr().err


def test_each_answer_is_tokenized_once(folder, monkeypatch):
    whole, said = sft.example, []
    monkeypatch.setattr(sft, "example", lambda prompt, *rest: said.append(prompt.uid) or whole(prompt, *rest))
    values = tree(folder, "once", train={"updates": 2, "rows": 80, "row_len": 8})
    assert run(folder, values, name="once.yaml") == 0
    assert len(said) == len(set(said)) == 100


def test_stages_weigh_the_parts_of_a_mix(folder, capsys):
    values = tree(folder, "staged", train={"updates": 2, "rows": 4, "row_len": 8})
    sums = values["data"].pop("source")
    (folder / "other.jsonl").write_text("".join(f'{{"prompt": "a{i}", "answer": "b"}}\n' for i in range(10)))
    parts = {"sums": sums, "other": {"name": "jsonl", "path": str(folder / "other.jsonl")}}
    seen = []

    def answers(prompts, rng):
        seen.append({prompt.meta["mix_part"] for prompt in prompts})
        return sft.own_answers(prompts, rng)

    stages = [{"weights": {"sums": 1}, "until": 1}, {"weights": {"other": 1}}]
    values["data"] |= {"source": {"name": "mix", "parts": parts}, "stages": stages}
    sft.run(load.build(sft.Config, load.Layer(values, {(): "test"}, "test")), answers)
    assert seen == [{"sums"}, {"other"}]
    stages[0] = {"weights": {"sums": 1}, "reach": 0.5}
    assert run(folder, values, name="reach.yaml") == 2
    assert "data.stages.0: sft has no reward to reach" in capsys.readouterr().err


def test_the_loss_is_the_mean_negative_logprob_of_the_answers():
    logprobs = jnp.asarray([[-9.0, -1.0, -2.0], [jnp.nan, -6.0, -9.0]])
    mask = jnp.asarray([[False, True, True], [False, True, False]])
    zeros = jnp.zeros((2, 3))
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=logprobs,
        rollout_logprobs=zeros,
        advantages=zeros,
        loss_mask=mask,
        segment_ids=jnp.ones((2, 3), jnp.int32),
    )
    mean, metrics = sft.NegativeLogLikelihood()(inputs)
    assert (float(mean.total), float(mean.count)) == (9.0, 3.0)
    assert float(metrics["loss/nll"].value) == 3.0


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {}}, "exactly one of model.path"),
        ({"tokenizer": {"alphabet": ""}}, "go together"),
        ({"seed": -1}, "seed must lie in [0, 2^31), got -1"),
        ({"train": {"updates": 0}}, "train.updates must be at least 1"),
        ({"train": {"updates": 1, "rows": 4, "row_len": 4}}, "train.row_len is 4: raise it"),
        ({"train": {"updates": 1, "rows": 101, "row_len": 8}}, "train.rows=101 is more than the 100"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(folder, capsys, sections, expected):
    assert run(folder, tree(folder, "bad", **sections), name="bad.yaml") == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert expected in said
    assert not (folder / "bad").exists()


def test_a_folder_that_sft_did_not_make_is_never_replaced(folder, capsys):
    (folder / "precious").mkdir(exist_ok=True)
    (folder / "precious" / "thesis.txt").write_text("years of work")
    (folder / "file").write_text("")
    for out, says in (
        ("precious", "was not made by this command"),
        ("file", "was not made by this command"),
        ("file/x", "cannot be written"),
    ):
        assert run(folder, tree(folder, out), name="precious.yaml") == 2
        assert says in capsys.readouterr().err
    assert (folder / "precious" / "thesis.txt").read_text() == "years of work"


@pytest.mark.slow
def test_adapters_learn_on_a_low_bit_model_and_are_a_folder_that_a_run_starts_from(folder, capsys):
    world = tiny.World(folder / "world")
    values = tree(
        folder, "adapters", model={"path": str(world.model)}, quant="w4a16:g32", lora={"rank": 8, "alpha": 16}
    )
    del values["tokenizer"]
    assert run(folder, values, name="adapters.yaml") == 0
    losses = [float(line.split()[3]) for line in capsys.readouterr().out.splitlines() if line.startswith("sft")]
    assert losses[-1] < 0.7 * losses[0]
    assert json.loads((folder / "adapters" / "adapter_config.json").read_text())["r"] == 8
    cfg = world.changed(lora={"rank": 8, "alpha": 16, "init": str(folder / "adapters")}).config
    learner = build.make_learner(cfg, build.policy_graphdef(cfg), build.make_mesh(cfg))
    params = models.by_path(build.load_policy(cfg, learner)[0])
    assert all(np.asarray(x).any() for x in params.values())


@pytest.mark.slow
def test_adapters_learn_on_a_released_model_whose_folder_ignores_a_layer(folder, capsys):
    rules = [{"match": "down_proj", "scheme": "bf16"}, {"match": "", "scheme": "w8a8"}]
    graphdef, params, _ = models.split(tiny.random_model())
    graphdef = models.with_scheme(graphdef, rules)
    model = tiny.model_folder(folder / "released")
    export.write_quantized(graphdef, params, models.quantize_params(graphdef, params), model)
    values = tree(folder, "on_released", model={"path": str(model)}, quant="w8a8", lora={"rank": 8})
    del values["tokenizer"]
    assert run(folder, values, "train.updates=1", name="released.yaml") == 0, capsys.readouterr().err
