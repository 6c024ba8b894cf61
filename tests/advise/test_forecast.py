# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Forecasts follow the registry, the roofline and the plan; their rates and errors are those of the records."""

import collections
import dataclasses
import json
import pathlib
import shlex

import numpy as np
import pytest
import yaml

from benchmarks import forecast as records
from qarl_jax import quant
from qarl_jax.advise import command as advise
from qarl_jax.advise import counts, forecast, measure
from qarl_jax.advise.machines import MACHINES
from qarl_jax.memory import learner
from qarl_jax.models import published
from qarl_jax.run import config
from qarl_jax.types import UserError
from qarl_jax.verify import alignment
from tests.reference import tiny

SMALL = ["rollout.max_response_len=64", "data.max_prompt_len=16"]


def advised(capsys, *words):
    assert advise.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def run():
    args = advise.build_parser().parse_args(["--model", "Qwen3-1.7B", "--device", "h200"])
    with published.folder("Qwen3-1.7B") as folder:
        cfg = advise.run_of(args, folder)
        yield cfg, forecast.of_schemes(cfg, MACHINES["h200"])


def test_every_registered_scheme_is_forecast_or_says_why_not(run):
    _, found = run
    assert tuple(found) == quant.scheme_names()
    for one in found.values():
        assert bool(one.seconds) != bool(one.problem)
    assert found["w8a8"].seconds["rollout"] < found["bf16"].seconds["rollout"]
    assert found["w4a16"].k3 == 0.0  # aligned
    assert found["w4a16"].k3_bf16 == quant.parse_scheme("w4a16").baseline_k3


def test_four_bits_stop_paying_at_the_batch_where_a_token_takes_as_long_as_in_bf16(run):
    _, found = run
    low, bf16 = found["w4a16"].cfg, found["bf16"].cfg

    def token(cfg, sequences):
        context = cfg.data.prompt_limit + cfg.rollout.max_response_len / 2
        counted = counts.token(
            learner.model_of(cfg), MACHINES["h200"], sequences, context, counts.weights_of(cfg, rollout=True)
        )
        return forecast.seconds({"token": counted}, forecast.RATES)["token"]

    last = found["w4a16"].stops_paying
    assert 1 < last < forecast.MOST_SEQUENCES
    assert token(low, last) >= token(bf16, last)
    assert token(low, last - 1) < token(bf16, last - 1)


def test_a_token_takes_no_less_than_its_bytes_and_a_batch_no_less_than_its_products(run):
    cfg, _ = run
    machine, weights = MACHINES["h200"], counts.weights_of(cfg, rollout=True)
    one, many = (counts.token(learner.model_of(cfg), machine, n, 100, weights)["read"] for n in (1, 4096))
    assert one >= (weights.dense_bytes + weights.head_bytes) / machine.bandwidth
    assert many >= 2 * 4096 * (weights.dense + weights.head) / machine.product
    bf16 = counts.weights_of(config.replaced(cfg, {"quant.forward": "bf16"}), rollout=True)
    # Qwen3-1.7B, 28 layers: q, o 2048 x 2048; k, v 2048 x 1024; three of 2048 x 6144; a head of 151936 x 2048.
    assert bf16.dense == 28 * 2048 * (2 * 2048 + 2 * 1024 + 3 * 6144)
    assert (bf16.head, bf16.dense_bytes) == (151936 * 2048, 2 * bf16.dense)
    assert weights.dense_bytes == bf16.dense * (4 + 16 / 128) / 8  # w4a16, a scale of 16 bits for 128 codes


def test_shorter_responses_take_less_of_every_phase_but_publishing(run):
    cfg, found = run
    short = forecast.of_run(config.replaced(cfg, {"quant.forward": "w8a8"}), MACHINES["h200"], mean_len=128)
    for phase in ("rollout", "old_logprobs", "update"):
        assert short.seconds[phase] < found["w8a8"].seconds[phase]
    assert short.seconds["publish"] == found["w8a8"].seconds["publish"]


def test_only_what_the_learner_scores_before_the_updates_is_forecast_as_scoring(run):
    cfg, found = run

    def of(**changes):
        return counts.scored(config.on_a_gpu(config.replaced(cfg, {"quant.forward": "w8a8", **changes})))

    assert cfg.train.updates_per_step == 2
    assert of() == alignment.CHECKED / 2
    for apart in ({"train.proximal": "learner"}, {"quant.engine": "plain"}, {"rollout.partial.over_provision": 1.5}):
        assert of(**apart) == 1
    assert of(**{"train.prompts_per_update": 0, "train.proximal": "learner"}) == 0
    passed = forecast.of_run(
        config.replaced(cfg, {"quant.forward": "w8a8", "train.proximal": "learner"}), MACHINES["h200"]
    )
    assert passed.seconds["old_logprobs"] == pytest.approx(found["w8a8"].seconds["old_logprobs"] * 32)
    assert {**passed.seconds, "old_logprobs": 0} == {**found["w8a8"].seconds, "old_logprobs": 0}


@pytest.mark.parametrize(("model", "waits_for"), [("Qwen3-30B-A3B", "memory"), ("Qwen3-14B", "products")])
def test_muon_waits_for_memory_where_its_matrices_are_as_small_as_an_experts(model, waits_for):
    args = advise.build_parser().parse_args(["--model", model, "--device", "h200", "--gpus", "4"])
    with published.folder(model) as folder:
        terms = counts.of_step(advise.run_of(args, folder), MACHINES["h200"])["update"]
    memory = terms["stream_iterates"] * forecast.RATES["stream_iterates"]
    products = terms["orthogonalize"] * forecast.RATES["orthogonalize"]
    assert ("memory" if memory > products else "products") == waits_for


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_a_low_bit_backward_takes_less_of_an_update(run, form):
    cfg, found = run
    low = forecast.of_run(config.replaced(cfg, {"quant.forward": "w8a8", "quant.backward": form}), MACHINES["h200"])
    assert low.seconds["update"] < found["w8a8"].seconds["update"]
    assert {**low.seconds, "update": 0} == {**found["w8a8"].seconds, "update": 0}


def test_speeds_of_a_low_bit_backward_are_the_records():
    rows = records.record("backward_products_8b_h200.json")["rows"]
    of_layer = {"q": 2, "kv": 2, "up": 2, "down": 1}  # o is as large as q
    took = collections.Counter()
    for row in rows:
        took[row["kind"]] += row["us"] * of_layer[row["layer"]]
    for form in ("int8", "fp8"):
        assert counts.FASTER[form] == round(took["xla/bf16"] / took[f"{form}/w8a8"], 2)


def test_recorded_steps_of_adapters_are_forecast_as_closely_as_is_said(tmp_path):
    folders, errors = records.Folders(tmp_path), []
    for name, place in (
        ("step_lora_8b_h100", 0),
        ("step_lora_8b_h100", 1),
        ("step_32b_nvfp4_h200", 0),
        ("step_32b_one_base_h100", 0),
        ("step_32b_one_base_h200", 1),
        *(("step_adapters_h200", place) for place in range(5)),
    ):
        found = records.record(f"{name}.json")
        row, machine = found["rows"][place], records.machine_of(found["device"])
        cfg, _ = records.settled(row["overrides"], folders.of(row["shapes"], 0), machine)
        terms = counts.of_step(cfg, machine, row["response_tokens"] / row["batch"])
        step = sum(forecast.seconds(terms, forecast.RATES).values())
        errors.append(abs(step / row["seconds"]["step"] - 1.0))
        assert forecast.error_of(cfg) == forecast.ADAPTERS_ERROR
    assert np.mean(errors) <= forecast.ADAPTERS_ERROR
    assert np.mean(errors[:5]) <= 0.15
    assert max(errors[:5]) < 0.25
    assert max(errors) < 0.56  # of responses whose lengths were drawn


def test_a_step_with_passes_that_are_not_counted_says_so_in_place_of_an_error(run):
    cfg = forecast.of_run(run[0], MACHINES["h200"]).cfg
    assert "(forecast, +-5%)" in forecast.line(cfg, MACHINES["h200"].size)
    assert "on L40S (forecast, by the vendor's peaks, not measured)" in forecast.line(cfg, MACHINES["l40s"].size)
    tree = yaml.safe_load(config.to_yaml(cfg))
    for sections in ({"critic": {}, "loss": {"name": "ppo"}, "advantage": {"name": "gae"}}, {"kl": {"coef": 0.1}}):
        changed = config.from_dict(tree | sections, "test")
        assert "(forecast, without the passes of critic and reference)" in forecast.line(changed, MACHINES["h200"].size)
        said = forecast.unknown({"bf16": forecast.Forecast(cfg=changed)}, MACHINES["h200"])
        assert "the passes of a critic and of a reference policy are not counted" in said


def test_the_config_to_start_from_is_the_forecast_run(run, capsys):
    assert advise.main(["--model", "Qwen3-1.7B", "--device", "h100"]) == 0
    said = capsys.readouterr().out
    tree = yaml.safe_load(said.split("To start from (")[1].split("\n\n", 1)[1])
    made = config.from_dict(tree, "test")
    assert made.quant.forward == said.split("To start from (")[1].split(")")[0]
    assert made.rollout.engine_name == "vllm"


def test_the_command_to_start_from_is_the_forecast_run(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    base = yaml.safe_load(pathlib.Path("configs/quickstart.yaml").read_text())
    file.write_text(yaml.safe_dump(base | {"quant": {"forward": "bf16", "rollout": "w4a16"}}))
    asked = ["--config", str(file), "--model", "Qwen3-0.6B", "--device", "h200", "--gpus", "2", "lora={rank: 16}"]
    assert advise.main(asked) == 0
    said = capsys.readouterr().out.split("To start from (")[1]
    made = config.load(str(file), shlex.split(said.split("qarl_jax.train ")[1])[1:])
    assert (made.model.path, made.mesh.fsdp, made.lora.rank) == ("Qwen3-0.6B", 2, 16)
    assert made.quant.forward == made.quant.rollout_scheme == said.split(")")[0]


def test_schemes_that_need_training_are_forecast_and_not_chosen(run, capsys):
    found = run[1]
    fast = found | {"w2a16": dataclasses.replace(found["w2a16"], seconds={"rollout": 1e-3})}
    assert [name for name in ("w2a16", "w4a4", "w3a16", "nvfp4", "fp8") if advise.needs_training(name)] == [
        "w2a16",
        "w4a4",
        "w3a16",
    ]
    assert not advise.needs_training(advise.best_of(fast))
    assert advise.best_of({name: one for name, one in fast.items() if name == "w2a16"}) == "w2a16"
    asked = ["--config", "configs/one_h200_8b.yaml", "--model", "Qwen3-8B", "--device", "h200", "quant.forward=nvfp4"]
    assert advise.main(asked) == 0
    said = capsys.readouterr().out
    assert "train it first (python -m qarl_jax.qat)" in said
    assert said.count(" quant.forward=") == 1


def test_a_model_that_the_default_scheme_cannot_quantize_is_forecast_under_others(tmp_path, capsys):
    shape = json.loads(pathlib.Path("assets/tiny-qwen3/config.json").read_text()) | {"hidden_size": 192}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    schemes = advised(capsys, "--model", str(tmp_path), "--device", "h100")["schemes"]
    assert "group size" in schemes["w4a16"]["problem"]
    assert schemes["w8a8"]["step_s"] > 0


def test_an_unmeasured_machine_and_a_model_that_does_not_fit_are_said(capsys):
    said = advised(capsys, "--model", "Qwen3-1.7B", "--device", "a100")
    assert any("no step was measured on a100" in line for line in said["unknown"])
    assert any("fp8" in line and "e4m3" in line for line in said["unknown"])
    (line,) = [line for line in said["unknown"] if "nvfp4" in line]
    assert line.endswith("w2a2: the mismatch of a bf16 learner was not measured on a GPU")
    assert advise.main(["--model", "Qwen3-235B-A22B", "--device", "h100", "--json"]) == 1
    assert "no scheme fits" in json.loads(capsys.readouterr().out)["verdict"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--device", "h200"], "name a model"),
        (["--device", "h200", "--model", "Qwen3-8C"], "Qwen3-8B"),
        (["--device", "h200", "--model", "Qwen3-8B", "--gpus", "0"], "--gpus must be at least 1"),
        (["--device", "h200", "--model", "Qwen3-8B", "--mean-len", "0"], "--mean-len must be positive"),
        (["--device", "h200", "--model", "Qwen3-8B", "--mean-len", "1025"], "at most rollout.max_response_len=1024"),
        (["--device", "h200", "--model", "Qwen3-8B", "rollout.max_len=4"], "max_response_len"),
    ],
)
def test_bad_input_is_told_in_a_sentence(capsys, words, error):
    assert advise.main(words) == 2
    assert error in capsys.readouterr().err


@pytest.mark.nightly
def test_rates_errors_and_page_are_those_of_the_records():
    rows = records.all_rows()
    assert records.rounded(records.fit(rows)) == forecast.RATES
    assert records.errors_by_kind(rows) == forecast.ERRORS
    assert max(forecast.ERRORS.values()) <= 0.15
    text = records.PAGE.read_text()
    assert records.page(text, rows) == text
    whole = [row for row in rows if row.step and row.is_fitted]
    found = records.errors(whole, records.left_out(rows))
    assert len(whole) > 30
    assert np.mean(found) < 0.15


@pytest.mark.slow
def test_a_layers_products_are_timed_under_a_scheme_as_the_learner_has_them(tmp_path):
    args = advise.build_parser().parse_args(["--model", str(tiny.model_folder(tmp_path)), "--device", "cpu", *SMALL])
    layers = {}
    for scheme in ("bf16", "w8a8"):
        cfg = config.replaced(advise.run_of(args, str(tmp_path)), {"quant.forward": scheme})
        layers[scheme] = layer = measure.layer_of(cfg, 8)
        assert min(layer.token, layer.forward, layer.both) > 0
    assert layers["bf16"].quantize == 0 < layers["w8a8"].quantize
    terms = counts.of_step(cfg, MACHINES["h200"])
    found = measure.products(cfg, terms, measure.Layer(token=1.0, forward=10.0, both=100.0, quantize=1000.0))
    model, updates = published_layers(tmp_path), cfg.train.updates_per_step
    assert found["rollout"] == 64 * model  # 64 tokens of a response
    passes = terms["update"]["micro_batch"]
    assert found["update"] == pytest.approx(passes * (100.0 + 10.0) + updates * model * 1000.0)  # all is made again


def published_layers(folder):
    return json.loads((folder / "config.json").read_text())["num_hidden_layers"]


@pytest.mark.nightly
def test_steps_of_schemes_that_were_not_run_are_those_of_the_one_that_was_and_their_products(tmp_path):
    folder = tiny.model_folder(tmp_path / "model")
    args = advise.build_parser().parse_args(["--model", str(folder), "--device", "cpu", *SMALL])
    cfg, machine = advise.run_of(args, str(folder)), MACHINES["h200"]
    found = measure.corrected(forecast.of_schemes(cfg, machine), "bf16", machine)
    assert [name for name, one in found.items() if one.measured] == [
        "bf16",
        "w8a8",
        "fp8",
    ]  # 128 do not divide its width
    run = measure.whole_step(config.replaced(cfg, {"quant.forward": "w8a8"}))
    assert found["w8a8"].step == pytest.approx(sum(run.values()), rel=0.5)


@pytest.mark.nightly
def test_a_measured_step_of_few_layers_says_what_all_layers_take(tmp_path, monkeypatch):
    folder = tiny.model_folder(tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"num_hidden_layers": 12}))
    args = advise.build_parser().parse_args(["--model", str(folder), "--device", "cpu", *SMALL, "quant.forward=bf16"])
    cfg = advise.run_of(args, str(folder))
    told, whole = measure.whole_step(cfg), measure.steps_of(cfg, 12)
    assert told.keys() == whole.keys() >= {"rollout", "update"}
    assert told["update"] == pytest.approx(whole["update"], rel=0.5)
    monkeypatch.setattr(measure, "LIMIT_S", 0.5)
    with pytest.raises(UserError, match=r"not measured within 0.5 s"):
        measure.steps_of(cfg, 2)
