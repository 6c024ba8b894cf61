# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Every file in configs/ is a runnable document: it parses, plans without weights, and says what it is.

The papers' runs are arms of their models' files (configs/papers), and must differ only in what the papers vary.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import re

import pytest
import yaml

from benchmarks import headers
from qarl_jax import qat, train
from qarl_jax.advise import counts, forecast, machines
from qarl_jax.data.sources import files
from qarl_jax.learning import critic
from qarl_jax.loss import grpo, gspo, ppo, sapo, tbpo
from qarl_jax.memory import costs
from qarl_jax.optim import build
from qarl_jax.run import config, description
from qarl_jax.typed_config import load as schema
from qarl_jax.types import UserError
from tests.reference import tiny

ROOT = pathlib.Path(__file__).parents[1]
FIXTURES = pathlib.Path(__file__).parent / "fixtures" / "models"
PAPERS = ROOT / "configs" / "papers"
RESULTS = ROOT / "benchmarks" / "results"
TABLES = sorted(PAPERS.glob("*arms.yaml"))
RECIPES = ROOT / "configs" / "gpu" / "recipes.yaml"
QAT = sorted((ROOT / "configs" / "qat").glob("*.yaml"))
MACHINES = yaml.safe_load(RECIPES.with_name("arms.yaml").read_text())
FIRST_RUN = (ROOT / "docs" / "first_gpu_run.md").read_text()
FILES = sorted({*(ROOT / "configs").rglob("*.yaml")} - {*(ROOT / "configs").rglob("*arms.yaml"), *QAT})
QWEN = ROOT / "configs" / "qwen25_coder_0p5b"
WORKBENCH = QWEN / "workbench.yaml"
ADAPTERS = QWEN / "lora.yaml"
QURL, QERL = (
    sorted(path.stem for path in PAPERS.glob(f"{paper}_*.yaml") if path not in TABLES) for paper in ("qurl", "qerl")
)
MODELS = sorted({path.stem for path in PAPERS.glob("q*.yaml") if path not in TABLES} - {*QURL, *QERL})
RUNS = sorted(schema.arms_of(config.RunConfig, PAPERS / "qwen3_8b_base.yaml"))
QURL_RUNS = sorted(schema.arms_of(config.RunConfig, PAPERS / f"{QURL[0]}.yaml"))
# What a run may change against its model's file, the folder aside.
VARIED = {"quant.forward", "quant.rollout", "quant.uaq_scale", "train.prompts_per_update", "optimizer.lr"}
# And one with a critic, which no other has.
CRITICS = {"ppo"}


def name(path):
    return str(path.relative_to(ROOT / "configs").with_suffix(""))


@functools.cache
def load(model, run):
    return config.load(PAPERS / f"{model}.yaml", [f"arm={run}"])


def flat(tree, prefix=""):
    out = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


@pytest.mark.parametrize("path", FILES, ids=name)
def test_it_parses_and_its_header_says_how_it_is_run(path):
    header = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"configs/{name(path)}.yaml" in header or "make quickstart" in header  # its own command, not a copied one
    assert "hardware" in header
    source = config.load(path).data.source
    if isinstance(source, files.Jsonl) and "make data" not in header and path.parent.name != "init":
        assert re.search(r"#   data      [\w-]+/[\w-]+ on Hugging Face", header)
    assert "micro-batch" in description.describe(config.load(path))


@pytest.mark.parametrize("arm", sorted(schema.arms_of(config.RunConfig, WORKBENCH)))
def test_an_arm_of_the_workbench_differs_from_qarl_in_what_is_learned_alone(arm):
    base, made = (flat(config.to_dict(config.load(WORKBENCH, [*choice]))) for choice in ([], [f"arm={arm}"]))
    differ = {key for key in base.keys() | made.keys() if base.get(key) != made.get(key)}
    assert differ
    assert all(key.split(".")[0] in {"loss", "advantage", "kl", "quant", "run_dir"} for key in differ), differ


@pytest.mark.parametrize("arm", sorted(schema.arms_of(config.RunConfig, ADAPTERS)))
def test_adapters_differ_from_the_full_parameter_run_of_that_name_in_rate_and_section_alone(arm):
    own = QWEN / f"{arm}.yaml"
    full = config.load(own) if own.exists() else config.load(QWEN / "qarl_w4a16.yaml", ["quant.forward=w8a8"])
    left, right = (flat(config.to_dict(cfg)) for cfg in (full, config.load(ADAPTERS, [f"arm={arm}"])))
    differ = {key for key in left.keys() | right.keys() if left.get(key) != right.get(key)}
    assert {key for key in differ if not key.startswith("lora")} == {"optimizer.lr", "run_dir"}


PLANNED = [
    *((path, "") for path in FILES),
    *((PAPERS / "qwen3_8b_base.yaml", run) for run in RUNS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("path", "arm"), PLANNED, ids=[f"{name(path)}{'-' * bool(arm)}{arm}" for path, arm in PLANNED])
def test_a_dry_run_plans_it_without_weights(path, arm, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # a config may say nothing that depends on where it is run
    folder = headers.folders() / pathlib.Path(config.load(path).model.path).name
    chosen = [f"arm={arm}"] if arm else []
    assert train.main(["--config", str(path), "--dry-run", f"model.path={folder}", *chosen]) == 0
    said = capsys.readouterr().out
    for part in ("scheme", "micro-batch", "masters", "optimizer", "GiB"):
        assert part in said
    assert not list(tmp_path.iterdir())


ON_GPUS = [path for path in FILES if headers.hardware(path)]


def planned(path, gpus, size, *overrides):
    settled, made = headers.planned(path, gpus, size, *overrides)
    assert (made.missing, made.devices) == (0, gpus)
    assert made.engines == (gpus if settled.rollout.engine_name == "vllm" else 0)
    gpu = {24: "L4", 48: "L40S", 80: "H100", 141: "H200"}[size]
    line = forecast.line(settled, int(headers.GIB_OF[size] * 2**30))
    assert not line or f" on {gpu} (forecast, " in line
    return settled, made


@pytest.mark.slow
@pytest.mark.parametrize("path", ON_GPUS, ids=name)
def test_every_arm_fits_its_headers_hardware_as_the_header_says(path):
    for arm in headers.arms(path):
        planned(path, *headers.hardware(path), *([f"arm={arm}"] if arm else []))
    text = path.read_text()
    if path.parent != QWEN:  # short steps, of which docs/appendix/qwen25_coder.md has measured ones
        assert re.search(r"#   a step    if all .*\n#             \S.* GiB", text)
        assert headers.header(path) == text, "python -m benchmarks.headers"


@pytest.mark.nightly
@pytest.mark.parametrize("path", ON_GPUS, ids=name)
def test_no_other_recomputation_makes_a_step_faster_by_its_forecast(path):
    """The plan orders its choices by estimates of its own, and they agree with the forecast within 7 %."""
    gpus, size = headers.hardware(path)
    machine = next(one for one in machines.MACHINES.values() if abs(one.size / headers.GIB_OF[size] / 2**30 - 1) < 0.04)

    def seconds(*overrides):
        settled, _ = planned(path, gpus, size, *overrides)
        return sum(forecast.seconds(counts.of_step(config.on_a_gpu(settled), machine), forecast.RATES).values())

    own = "arms" in yaml.safe_load(path.read_text())
    for arm in [[f"arm={arm}"] for arm in schema.arms_of(config.RunConfig, path)] if own else [[]]:
        chosen = seconds(*arm)
        for remat in costs.REPEATED:
            with contextlib.suppress(UserError):  # it does not fit
                assert chosen < 1.07 * seconds(*arm, f"model.remat={remat}"), (arm, remat)


@pytest.mark.slow
@pytest.mark.parametrize("arm", ["tbpo", "grpo", "gspo", "sapo", "positive_grpo", "on_policy_grpo"])
def test_arms_of_the_large_moe_model_in_int4_fit_80_gb(arm):
    planned(PAPERS / "qwen3_30b_a3b_base.yaml", 8, 80, f"arm={arm}")


@pytest.mark.slow
def test_every_machine_has_room_for_its_recipe_as_it_says():
    for arm, row in MACHINES.items():
        gpus, size = map(int, re.match(r"(\d+)x(\d+)", arm).groups())
        settled, made = planned(RECIPES, gpus, size, f"arm={arm}")
        assert row["planned"] == {
            "learner": pytest.approx(made.needed / 2**30, abs=0.6),
            "engine": pytest.approx(made.reserved / 2**30, abs=0.6),
            "step": headers.took(settled, size),
        }, arm
        model = pathlib.Path(config.load(RECIPES, [f"arm={arm}"]).model.path).name
        assert model in row["about"]
        held = " | ".join(str(row["planned"][part]) for part in ("learner", "engine", "step"))
        assert f"| {gpus} x {size} GB | `{arm}` | {model} | {held} |" in FIRST_RUN
        assert (settled.train.grad_dtype == "bfloat16") == ("bfloat16 gradients" in row["about"])


def test_a_run_that_was_made_stands_beside_its_plan():
    """Its seconds a step are those of the record, in the table of arms or in its config's header."""
    for record in ("recipes_h100", "recipes_h200", "recipes_16k_planned_h200"):
        for row in json.loads((RESULTS / f"{record}.json").read_text())["rows"]:
            if "seconds" not in row:
                continue
            took, arm = f"{row['seconds']['step']:.1f} s", row["overrides"][0].removeprefix("arm=")
            gpus = f"{['one', 'two'][row['cards'] - 1]} {record[-4:].upper()}"
            if ROOT / row["recipe"] == RECIPES:
                assert f"{took} on {gpus}" in MACHINES[arm]["measured"]
            else:
                said = re.search(r"#   measured .*", (ROOT / row["recipe"]).read_text())[0]
                assert all(words in said for words in (took, gpus, record))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "larger"),
    [
        pytest.param("1x80", "Qwen3-8B-Base", marks=pytest.mark.nightly),
        ("1x141", "Qwen3-14B-Base"),
        ("4x80", "Qwen3-32B"),
    ],
)
def test_the_next_larger_model_does_not_fit(arm, larger):
    gpus, size = map(int, arm.split("x"))
    with pytest.raises(UserError, match="does not fit the device"):
        planned(RECIPES, gpus, size, f"arm={arm}", f"model.path={headers.folders() / larger}")


@pytest.fixture(scope="module")
def world(compiled_programs, tmp_path_factory):
    """A tiny model with its data; the runs over it share their compiled programs."""
    return tiny.World(tmp_path_factory.mktemp("world"))


# ---- the papers' comparison ----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS + QURL)
def test_every_model_has_every_run_in_a_folder_of_its_own(model):
    runs = QURL_RUNS if model in QURL else RUNS
    assert sorted(schema.arms_of(config.RunConfig, PAPERS / f"{model}.yaml")) == runs
    assert {load(model, run).run_dir for run in runs} == {f"runs/papers/{model}/{run}" for run in runs}


@pytest.mark.parametrize("table", TABLES, ids=lambda path: path.stem)
def test_every_arm_says_what_it_is_and_whose_number_is_expected(table):
    rows = yaml.safe_load(table.read_text())
    known = {"about", "paper", "expected", "differs", "set"}
    for arm, row in rows.items():
        assert set(row) <= known, arm
        assert "set" in row, arm
        assert table.stem == "quickstart_arms" or row["about"].endswith("."), arm
        assert table.stem == "quickstart_arms" or row["paper"], arm
        assert set(row.get("expected", {})) <= {*MODELS, *QURL, *QERL}, arm


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("model", MODELS)
def test_a_run_differs_only_in_what_the_papers_vary(model, run):
    base, this = (flat(config.to_dict(load(model, which))) for which in ("tbpo", run))
    changed = {key for key in base.keys() | this.keys() if base.get(key) != this.get(key)} - {"run_dir"}
    own = ("loss.", "critic", "advantage.") if run in CRITICS else ("loss.",)
    own += ("rollout.engine.",) if run == "tbpo_w4a8" else ()  # vLLM on a GPU has no such layers
    assert {key for key in changed if not key.startswith(own)} <= VARIED


@pytest.mark.parametrize("model", QURL)
def test_qurls_arms_differ_in_scheme_correction_scale_and_rate_alone(model):
    base = flat(config.to_dict(load(model, "bf16")))
    for run in QURL_RUNS:
        this = flat(config.to_dict(load(model, run)))
        changed = {key for key in base.keys() | this.keys() if base.get(key) != this.get(key)} - {"run_dir"}
        assert changed <= {"quant.rollout", "quant.uaq_scale", "loss.mismatch", "loss.ratio", "optimizer.lr"}, run
        assert (this["quant.forward"], this["optimizer.name"]) == ("bf16", "adamw")
        assert this["quant.rollout"] == ("bf16" if run == "bf16" else "fp8" if run.endswith("fp8") else "w8a8")


def test_qurls_settings_are_those_of_the_paper():
    gsm8k, dapo, scaler = (
        load(model, "acr_int8") for model in ("qurl_ppo_gsm8k", "qurl_dapo_7b", "qurl_deepscaler_1p5b")
    )
    assert (gsm8k.train.steps, gsm8k.train.prompts_per_step, gsm8k.optimizer.lr) == (435, 256, 1e-5)
    assert gsm8k.rollout.max_response_len == 512
    assert (dapo.train.steps, dapo.train.prompts_per_step, dapo.rollout.num_samples_per_prompt) == (200, 512, 16)
    assert (dapo.loss.clip_low, dapo.loss.clip_high, dapo.kl.coef) == (0.2, 0.28, 0)
    assert (dapo.rollout.dynamic.max_batches, dapo.rollout.dynamic.metric) == (10, "math_verify")
    verifier, penalty = dapo.reward.terms
    assert (verifier.coef, penalty.coef, penalty.reward.buffer_len) == (1.0, 0.5, 3072 // 5)
    assert (scaler.train.prompts_per_step, scaler.kl.coef, scaler.rollout.temperature) == (256, 1e-3, 0.6)
    stages = [(stage.until, stage.max_response_len, stage.num_samples_per_prompt) for stage in scaler.rollout.stages]
    assert stages == [(800, 8192, 8), (1200, 16384, 0)]
    assert (scaler.rollout.max_response_len, scaler.rollout.num_samples_per_prompt) == (24576, 16)
    assert load("qurl_dapo_7b", "acr_uaq2_int8").quant.uaq_scale == 2
    assert load("qurl_dapo_7b", "acr_lr2_int8").optimizer.lr == 2e-6


@pytest.mark.slow
@pytest.mark.parametrize("model", QERL)
def test_qerls_arms_are_its_recipe_and_differ_in_model_base_noise_and_rate_alone(model):
    arms = schema.arms_of(config.RunConfig, PAPERS / f"{model}.yaml")
    sizes = {re.match(r"\d+b", arm).group() for arm in arms}
    assert sizes == {"3b", "7b", "14b", "32b"}
    base = flat(config.to_dict(load(model, "7b_nvfp4_aqn")))
    for arm in arms:
        cfg = load(model, arm)
        size, scheme = re.match(r"(\d+)b_(\w+?)(?:_aqn)?$", arm).groups()
        assert cfg.model.path == f"models/Qwen2.5-{size}B-Instruct"
        assert (cfg.quant.forward, cfg.quant.rollout_scheme) == (scheme, scheme)
        assert (cfg.rollout.norm_noise is not None) == arm.endswith("_aqn")
        assert cfg.optimizer.lr == (5e-6 if scheme == "bf16" else 1e-5)
        this = flat(config.to_dict(cfg))
        changed = {key for key in base.keys() | this.keys() if base.get(key) != this.get(key)} - {"run_dir"}
        assert {key for key in changed if not key.startswith("rollout.norm_noise")} <= {
            "model.path",
            "quant.forward",
            "optimizer.lr",
        }
    cfg = load(model, "7b_nvfp4_aqn")
    assert (cfg.lora.rank, cfg.loss.clip_high, cfg.loss.aggregation, cfg.kl.coef) == (32, 0.28, "token-mean", 0)
    assert (cfg.optimizer.b1, cfg.optimizer.b2, cfg.optimizer.weight_decay, cfg.optimizer.clip_norm) == (
        0.9,
        0.99,
        0.1,
        0.2,
    )
    assert {cfg.optimizer.moment_dtype, cfg.optimizer.second_moment_dtype} == {"int8"}
    assert (cfg.optimizer.schedule.kind, cfg.optimizer.schedule.warmup_updates) == ("cosine", cfg.policy_updates // 10)
    assert cfg.train.mask_truncated
    lengths = {"qerl_gsm8k": (256, 2048, 4), "qerl_bigmath": (1024, 4096, 1)}
    assert (cfg.data.max_prompt_len, cfg.rollout.max_response_len, cfg.train.updates_per_step) == lengths[model]


@pytest.mark.parametrize("run", RUNS)
def test_a_run_is_the_same_change_for_every_model(run):
    def recipe(model):
        cfg = load(model, run)
        lr = cfg.optimizer.lr / load(model, "tbpo").optimizer.lr
        return cfg.quant, cfg.loss, cfg.train.updates_per_step == 1, lr, cfg.advantage

    published = [recipe(model) for model in MODELS if model != "quickstart"]
    assert all(one == published[0] for one in published)
    # The quickstart's short responses need wider bands (see quickstart.yaml) and its scales are plain arithmetic.
    quant, loss, *others = recipe("quickstart")
    assert dataclasses.replace(quant, engine="auto") == published[0][0]
    bands = {"clip_high", "clip_low", "neg_clip_low", "neg_clip_high"} if loss.name in ("tbpo", "gspo") else set()
    kept = {f.name: getattr(published[0][1], f.name) for f in dataclasses.fields(loss) if f.name in bands}
    assert dataclasses.replace(loss, **kept) == published[0][1]
    assert tuple(others) == published[0][2:]
    critics = {load(model, run).critic for model in MODELS if model != "quickstart"}
    offloaded = critic.Config(optimizer=build.AdamW(lr=1e-5, offload="auto"))
    assert critics == {offloaded if run in CRITICS else None}
    assert (load("quickstart", run).critic is None) == (run not in CRITICS)


def test_the_quickstarts_bands_are_widened_alike():
    main, aligned = load("quickstart", "tbpo").loss, load("quickstart", "gspo").loss
    published = tbpo.Config(), gspo.Config()
    wider = main.clip_high / published[0].clip_high
    for key in ("neg_clip_low", "neg_clip_high"):
        assert getattr(main, key) == pytest.approx(wider * getattr(published[0], key))
    for key in ("clip_low", "clip_high"):
        assert getattr(aligned, key) == pytest.approx(wider * getattr(published[1], key))


def test_the_main_run_has_the_settings_of_the_paper():
    for model in MODELS:
        if model == "quickstart":
            continue
        cfg = load(model, "tbpo")
        assert cfg.loss == tbpo.Config(clip_high=4e-4, neg_clip_low=3e-4, neg_clip_high=7e-4, mismatch_cap=2.0)
        assert (cfg.quant.forward, cfg.quant.rollout_scheme, cfg.quant.group_size) == ("w4a16", "w4a16", 128)
        assert (cfg.optimizer.lr, cfg.optimizer.weight_decay) == (1e-6, 0.01)
        assert isinstance(cfg.optimizer, build.Muon)
        assert (cfg.train.prompts_per_step, cfg.train.updates_per_step) == (512, 8)
        assert cfg.rollout.num_samples_per_prompt == 8
    long = load("qwen3_8b_base", "tbpo")
    assert (long.data.max_prompt_len, long.rollout.max_response_len) == (2048, 16384)


@pytest.mark.parametrize(
    ("run", "forward", "rollout", "loss"),
    [
        ("bf16_grpo", "bf16", "bf16", grpo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("bf16_gspo", "bf16", "bf16", gspo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("bf16_tbpo", "bf16", "bf16", tbpo.Config()),
        ("tbpo_fp8", "fp8", "fp8", tbpo.Config()),
        ("tbpo_w8a8", "w8a8", "w8a8", tbpo.Config()),
        ("tbpo_w4a8", "w4a8", "w4a8", tbpo.Config()),
        ("rollout_grpo", "bf16", "w4a16", grpo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("rollout_gspo", "bf16", "w4a16", gspo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("rollout_tbpo", "bf16", "w4a16", tbpo.Config()),
        ("grpo", "w4a16", "w4a16", grpo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("gspo", "w4a16", "w4a16", gspo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("mis_gspo", "w4a16", "w4a16", gspo.Config(mismatch="seq_mis", mismatch_cap=2.0)),
        ("positive_grpo", "w4a16", "w4a16", grpo.Config(mismatch="tis", positive_only=True)),
        ("on_policy_grpo", "w4a16", "w4a16", grpo.Config(mismatch="tis", on_policy=True)),
        ("dual_clip_grpo", "w4a16", "w4a16", grpo.Config(mismatch="tis", dual_clip=3.0)),
        ("sapo", "w4a16", "w4a16", sapo.Config(mismatch="tis")),
        ("ppo", "w4a16", "w4a16", ppo.Config(mismatch="tis", mismatch_cap=2.0)),
        ("flashrl_tis", "bf16", "w8a8", grpo.Config(mismatch="tis", aggregation="seq-mean-token-mean")),
        ("qurl_acr", "bf16", "w8a8", grpo.Config(mismatch="acr", aggregation="seq-mean-token-mean")),
        ("qurl_acr_uaq", "bf16", "w8a8", grpo.Config(mismatch="acr", aggregation="seq-mean-token-mean")),
        ("qurl_acr_lr", "bf16", "w8a8", grpo.Config(mismatch="acr", aggregation="seq-mean-token-mean")),
    ],
)
def test_a_run_is_what_its_name_says(run, forward, rollout, loss):
    cfg = load("qwen3_8b_base", run)
    assert (cfg.quant.forward, cfg.quant.rollout_scheme, cfg.loss) == (forward, rollout, loss)
    assert (cfg.train.updates_per_step == 1) == (run == "on_policy_grpo")
    assert (cfg.quant.uaq_scale == 1.5) == (run == "qurl_acr_uaq")
    assert (cfg.optimizer.lr == pytest.approx(1.5e-6)) == (run == "qurl_acr_lr")


@pytest.mark.nightly  # tests/test_train.py has tbpo, grpo, and a bf16 learner as QuRL has it, test_critic.py a critic
@pytest.mark.parametrize("run", RUNS)
def test_every_run_trains_two_steps_on_a_tiny_model(run, world):
    cfg = load("quickstart", run)
    sections = {"loss": schema.to_dict(cfg)["loss"], "run_dir": str(world.folder / run)}
    schemes = {
        key: f"{value}:g32" if value in ("w4a16", "w4a8") else value
        for key, value in {"forward": cfg.quant.forward, "rollout": cfg.quant.rollout}.items()
    }
    sections["quant"] = schemes | {"uaq_scale": cfg.quant.uaq_scale}
    sections |= {"advantage": schema.to_dict(cfg)["advantage"], "critic": {} if run in CRITICS else None}
    if cfg.train.updates_per_step == 1:
        sections["train"] = {"prompts_per_update": 0}
    changed = world.changed(**sections)
    assert train.main(changed.command()) == 0
    records = changed.records()
    assert len(records) == 2
    for record in records:
        assert "nonfinite" not in record
        assert record["train/updates"] == (1 if run == "on_policy_grpo" else 2)
        assert record["optim/update_norm"] > 0


# ---- options -------------------------------------------------------------------------------------------------------

MOST_OPTIONS = 150


def leaf_keys(tree, prefix=""):
    for key, value in tree.items():
        yield from leaf_keys(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [prefix + key]


def keys_of_a_file(node, prefix=""):
    """Dotted paths of a YAML file; those of an arm's or an evaluation's settings end with the option's."""
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}.{key}"
        yield from keys_of_a_file(value, f"{prefix}.{key}")


def test_a_run_has_few_options_and_each_is_in_a_config_or_on_a_page():
    options = list(leaf_keys(schema.to_dict(config.load(ROOT / "configs" / "quickstart_vllm.yaml"))))
    assert len(options) <= MOST_OPTIONS
    files = (yaml.safe_load(path.read_text()) for path in (ROOT / "configs").rglob("*.yaml"))
    said = {key for file in files for key in keys_of_a_file(file)}
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "bridge" / "README.md"]
    text = "\n".join(page.read_text() for page in pages if "log" not in page.parts)
    unnamed = []
    for option in options:
        section_and_name, name = ".".join(option.split(".")[-2:]), option.rpartition(".")[2]
        page = rf"\b{re.escape(section_and_name)}\b|`{name}\b[^`\n]*`|\b{name}[:=]"
        if not any(key.endswith(f".{option}") for key in said) and not re.search(page, text):
            unnamed.append(option)
    assert not unnamed


@pytest.mark.parametrize("path", QAT, ids=name)
def test_a_training_before_rl_parses_and_its_header_says_how_it_is_run(path):
    assert schema.load(qat.command.Config, path).stages
    header = "\n".join(line for line in path.read_text().splitlines() if line.startswith("#"))
    assert f"python -m qarl_jax.qat --config configs/{name(path)}.yaml" in header
    assert "hardware" in header
