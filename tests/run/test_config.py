# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The config of a run: what it resolves to, and which settings are refused. Reading: typed_config/test_load.py."""

import glob
import os

import pytest
import yaml

from qarl_jax import sft
from qarl_jax.loss import grpo, tbpo
from qarl_jax.numerics import engine as numerics
from qarl_jax.run import config, description
from qarl_jax.typed_config import annotations
from qarl_jax.typed_config import load as schema
from qarl_jax.types import UserError

MINIMAL = {
    "model": {"path": "m"},
    "data": {"source": {"name": "reasoning_gym", "dataset": "chain_sum"}, "max_prompt_len": 64},
    "rollout": {"max_response_len": 64},
}


@pytest.fixture
def write(tmp_path):
    def write_file(content, name="run.yaml"):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False))
        return str(path)

    return write_file


@pytest.fixture
def load(write):
    """Loads MINIMAL with overrides."""
    return lambda *overrides: config.load(write(MINIMAL), overrides)


def test_a_run_gets_its_folder_from_the_name_of_its_file(write):
    assert config.load(write(MINIMAL, "abc.yaml")).run_dir == os.path.join("runs", "abc")
    assert config.load(write(MINIMAL, "abc.yaml"), ["run_dir=elsewhere"]).run_dir == "elsewhere"


# ---- arms -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def with_arms(write):
    """A file with two tables of arms, the second of which adds to the first."""
    write(
        "a: {about: x, set: {train: {steps: 5, prompts_per_step: 4}, loss: {name: grpo}}}\nb: {set: {seed: 7}}\n",
        "1.yaml",
    )
    write("a: {set: {train: {steps: 6}, loss: {clip_high: 0.3}}}\nbroken: {about: nothing}\n", "2.yaml")
    return write(MINIMAL | {"run_dir": "runs/x", "seed": 3, "arms": ["1.yaml", "2.yaml"]})


def test_an_arm_is_laid_over_its_file_and_under_the_overrides_and_has_a_folder_of_its_own(with_arms):
    plain, arm = config.load(with_arms), config.load(with_arms, ["arm=a"])
    assert (plain.run_dir, plain.seed, plain.loss) == ("runs/x", 3, tbpo.Config())
    assert (arm.run_dir, arm.seed) == (os.path.join("runs/x", "a"), 3)
    assert (arm.train.steps, arm.train.prompts_per_step, arm.loss) == (6, 4, grpo.Config(clip_high=0.3))
    over = config.load(with_arms, ["train.steps=9", "arm=a", "run_dir=here"])
    assert (over.train.steps, over.train.prompts_per_step, over.run_dir) == (9, 4, "here")
    assert config.load(with_arms, ["arm=a", "arm=b"]).seed == 7
    assert set(schema.arms_of(config.RunConfig, with_arms)) == {"a", "b", "broken"}


def test_an_arm_that_is_not_there_or_says_nothing_is_told(with_arms, write):
    with pytest.raises(
        UserError, match=r"'arm=bb': .*run.yaml has no such arm. Did you mean b\? Its arms: a, b, broken"
    ):
        config.load(with_arms, ["arm=bb"])
    with pytest.raises(UserError, match=r"2.yaml:2: broken: expected a mapping with `set`"):
        config.load(with_arms, ["arm=broken"])
    with pytest.raises(UserError, match=r"It names no table of `arms`"):
        config.load(write(MINIMAL, "other.yaml"), ["arm=a"])
    with pytest.raises(UserError, match=r"arms: expected a list of files, got 'x'"):
        config.load(write(MINIMAL | {"arms": "x"}, "wrong.yaml"))


def test_a_mistake_in_an_arm_is_told_with_its_line(write):
    write("a:\n  set:\n    train: {stepz: 5}\n", "1.yaml")
    with pytest.raises(UserError, match=r"1.yaml:3: train.stepz: unknown key"):
        config.load(write(MINIMAL | {"arms": ["1.yaml"]}), ["arm=a"])


def test_model_and_data_are_the_only_things_one_must_say(load):
    cfg = load()
    assert isinstance(cfg.loss, tbpo.Config)
    assert cfg.quant.rollout_scheme == cfg.quant.forward == "w4a16"
    for key in ("model", "data"):
        with pytest.raises(UserError, match=f"{key} is required"):
            config.from_dict({k: v for k, v in MINIMAL.items() if k != key})


def test_a_loss_is_chosen_by_name_with_its_own_fields(load):
    assert load("loss.name=grpo", "loss.dual_clip=3").loss == grpo.Config(dual_clip=3.0)
    with pytest.raises(UserError, match=r"loss\.spread_ref: this field belongs to loss\.name=tbpo, and"):
        load("loss.name=grpo", "loss.spread_ref=1")


def test_derived_numbers_are_in_prompts_and_printed(load):
    cfg = load(
        "train.steps=10",
        "train.prompts_per_step=32",
        "train.prompts_per_update=8",
        "train.update_epochs=2",
        "rollout.num_samples_per_prompt=4",
    )
    # 32 / 8 = 4 updates per pass, two passes; 10 steps.
    assert (cfg.train.updates_per_step, cfg.train.total_updates, cfg.row_len) == (8, 80, 128)
    text = description.describe(cfg)
    for part in (
        "32 prompts x 4 samples = 128 responses",
        "8 prompts x 4 samples = 32 responses",
        "8 updates per step",
    ):
        assert part in text
    assert "10 steps = 80 updates = 1280 responses" in text


STAGES = "rollout.stages=[{until: 3, max_response_len: 16}, {until: 5, max_response_len: 32}]"


@pytest.mark.parametrize(
    ("forward", "rollout", "said"),
    [
        ("w4a16", "w8a8", ["different policies by intent", "different grids", "control", "set it to w4a16"]),
        ("w4a16", "bf16", ["different policies by intent", "unquantized policy's samples"]),
        ("bf16", "w8a8", ["different policies by intent", "baseline", "quant.forward=w8a8"]),
        ("w4a16", "w4a16:g128", []),
        ("w8a8", "w8a8", []),
    ],
)
def test_an_arm_in_which_learner_and_sampler_differ_says_so_and_what_it_is_for(load, forward, rollout, said):
    text = description.describe(load(f"quant.forward={forward}", f"quant.rollout={rollout}"))
    for part in said:
        assert part in text
    assert bool(said) == ("different policies" in text)


def test_stages_are_resolved_by_the_step_alone(load):
    cfg = load("train.steps=8", STAGES)
    assert [cfg.rollout.max_response_len_at(step) for step in range(8)] == [16] * 3 + [32] * 2 + [64] * 3
    assert [cfg.rollout.sampling((1,), step).max_response_len for step in (2, 3, 5)] == [16, 32, 64]
    assert cfg.rollout.sampling().max_response_len == 64  # evaluation's, and what is planned for
    assert [cfg.row_len_at(step) for step in (2, 3, 5)] == [80, 96, 128]
    assert cfg.row_len == 128
    fixed = load("train.row_len=130", STAGES)
    assert {fixed.row_len_at(step) for step in range(8)} == {130}
    assert [load().rollout.max_response_len_at(step) for step in (0, 10**6)] == [64, 64]


def test_stages_and_partial_rollouts_are_printed(load):
    text = description.describe(load("train.steps=8", STAGES))
    for part in (
        "stages       steps 0 to 2: response <= 16 tokens, rows of 80",
        "             steps 3 to 4: response <= 32 tokens, rows of 96",
        "             steps 5 to 7: response <= 64 tokens, rows of 128",
        "the learner's programs are compiled 3 times, once for each length of a row",
    ):
        assert part in text
    short = description.describe(load("train.steps=4", "train.row_len=130", STAGES))
    assert "steps 3 to 3: response <= 32 tokens, rows of 130" in short
    assert "steps 5" not in short  # never reached
    assert "compiled 1 time," in short
    text = description.describe(load("train.prompts_per_step=8", "rollout.partial={over_provision: 1.5, max_lag: 2}"))
    assert "12 prompts in hand; a step ends when 8 are complete, which is looked at every 8 tokens" in text
    assert "trained on at most 2 steps after" in text
    assert "stages" not in text
    assert "in hand" not in description.describe(load())


PPO = ("loss.name=ppo", "advantage.name=gae", "critic={}")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.prompts_per_step=8", "train.prompts_per_update=3"], "prompts_per_step=8 is not a multiple of"),
        (
            ["train.prompts_per_step=8", "train.prompts_per_update=16"],
            "prompts_per_update=16 exceeds",
        ),
        (["train.steps=-1"], "steps must be at least 1, got -1"),
        (["train.steps=0"], "steps must be at least 1, got 0"),
        (
            ["train.row_len=100"],
            "train.row_len=100 is shorter than data.max_prompt_len=64 + rollout.",
        ),
        (["rollout.num_samples_per_prompt=1"], "a single response always gets advantage 0"),
        (["advantage.name=gae"], "the run has none: add `critic: {}`"),
        (["critic={}"], "advantage.name=grpo does not ask it; set advantage.name=gae, or critic=null"),
        (["loss.name=ppo"], "loss.name=ppo is the actor of a critic: set advantage.name=gae and `critic: {}`"),
        (["advantage.name=gae", "critic={}"], "loss.name=tbpo weighs a response by a single advantage"),
        ([*PPO, "critic.warmup_steps=10", "train.steps=10"], "critic.warmup_steps=10 leaves none of train.steps=10"),
        (["advantage.name=drgrpo", "advantage.gamma=1"], "this field belongs to advantage.name=gae"),
        (
            [*PPO, "rollout.num_samples_per_prompt=1", "rollout.dynamic.max_batches=2"],
            "rollout.dynamic.max_batches=2 keeps groups whose responses differ",
        ),
        (["rollout.temperature=0"], "temperature must be positive for training, got 0"),
        (["rollout.top_p=0.9"], "rollout.top_p"),
        (
            ["train.micro_batch_rows=6", "mesh.fsdp=4"],
            "train.micro_batch_rows=6 is not a multiple of mesh.data x",
        ),
        (["mesh.data=0"], "data=0: a mesh axis has at least 1 device"),
        (["mesh.data=-1", "mesh.fsdp=-1"], "only one mesh axis may be -1"),
        (["quant.forward=w5a16"], "'w5a16'"),
        (["quant.rollout=int4"], "'int4'"),
        (["quant.rules=[{match: '(', scheme: w8a8}]"], "is not a regular expression"),
        (["quant.rules=[{match: mlp}]"], "quant.rules.0.scheme is required"),
        (["data.holdout=1.0"], "holdout is a share"),
        (["data.max_prompt_len=-1"], "max_prompt_len must be at least 0"),
        (["seed=-1"], "seed must lie in"),
        (["eval.num_samples=4"], "greedy responses to a prompt are all the same"),
        (["eval.temperature=-1"], "temperature must not be negative"),
        (["reward.name=overlong", "reward.buffer_len=65"], "buffer_len=65 exceeds the limit of 64 tokens"),
        (["reward={name: sum, terms: []}"], "needs at least one entry in `terms`"),
        (
            ["data.source.name=jsonl", "data.source.path=x", "reward.name=reasoning_gym"],
            "reward.name=reasoning_gym asks the task's own scorer, but data.source is not reasoning_gym",
        ),
        (
            ["data.source.name=jsonl", "data.source.path=x", "data.source.answer_key=a"],
            "answer_key needs prompt_key",
        ),
        (["rollout.engine.name=vllm", "rollout.engine.max_model_len=100"], "rollout.engine.max_model_len=100 is below"),
        (
            ["rollout.stages=[{until: 5, max_response_len: 8}, {until: 5, max_response_len: 16}]"],
            "stages.1: until=5 does not come after the stage before it, which lasts until step 5",
        ),
        (
            ["rollout.stages=[{until: 5, max_response_len: 65}]"],
            "stages.0: max_response_len=65 exceeds rollout.max_response_len=64",
        ),
        (["rollout.stages=[{until: 0, max_response_len: 8}]"], "until must be at least 1, got 0"),
        (["rollout.stages=[{until: 5, max_response_len: 0}]"], "this one sets neither"),
        (["rollout.stages=[{until: 5, max_response_len: -1}]"], "max_response_len must be at least 0, got -1"),
        (["rollout.stages=[{until: 5}]"], "rollout.stages.0: a stage sets max_response_len or num_samples_per_prompt"),
        (["rollout.stages=[{until: 5, num_samples_per_prompt: 1}]"], "num_samples_per_prompt=1 must lie between 2 and"),
        (["rollout.stages=[{until: 5, num_samples_per_prompt: 99}]"], "for which memory is planned"),
        (
            ["rollout.stages=[{until: 5, num_samples_per_prompt: 2}]", "rollout.partial.over_provision=1.5"],
            "num_samples_per_prompt and partial rollouts do not go together",
        ),
        (
            ["rollout.environment.name=calculator", "rollout.partial.over_provision=1.5"],
            "environment and partial rollouts do not go together",
        ),
        (
            ["rollout.environment={name: calculator, max_turn_len: 65}"],
            "max_turn_len=65 exceeds max_response_len=64",
        ),
        (["reward.name=environment"], "reward.name=environment adds up what an environment gives"),
        (["loss.name=grpo", "advantage.level=turn"], "without rollout.environment a response has one"),
        (
            ["loss.name=tbpo", "advantage.level=turn", "rollout.environment.name=calculator"],
            "advantage.level=turn one to every turn; use loss.name=grpo",
        ),
        (["advantage.level=word"], "level = 'word'"),
        (["data.stages=[{weights: {math: 1}}]"], "stages weighs the parts of a mix"),
        (["reward={name: by_source, rewards: {math: {name: exact}}}"], "none (it is no mix)"),
        (
            ["loss={name: grpo, on_policy: true}", "train.update_epochs=2"],
            "loss.on_policy=true is for one update per step",
        ),
        (["train.asynchronous.chunk=8"], "chunk=8 decides nothing at max_staleness=0"),
        (
            ["train.asynchronous.max_staleness=1", "rollout.partial.over_provision=1.5"],
            "both sample ahead of the step that trains",
        ),
        (["rollout.stages={until: 5}"], "rollout.stages: expected a list"),
        (
            ["rollout.stages=[{until: 5, max_response_len: 8}]", "reward.name=overlong", "reward.buffer_len=9"],
            "buffer_len=9 exceeds the limit of 8 tokens (rollout.stages)",
        ),
        (["rollout.partial.over_provision=3"], "over_provision must lie in [1, 2] (1: off), got 3.0"),
        (
            ["rollout.partial.over_provision=1.5", "rollout.partial.chunk=64"],
            "chunk=64 is not below max_response_len=64",
        ),
        (["rollout.partial.chunk=8"], "chunk=8 decides nothing at over_provision=1"),
        (["rollout.partial.over_provision=2", "rollout.partial.max_lag=0"], "max_lag must be at least 1"),
        (["checkpoint.every=-1"], "every must be at least 0, got -1; 0 means never"),
        (["optimizer.lr=-1"], "lr"),
        (["loss.clip_high=-1"], "clip_high"),
        (
            [*PPO, "critic.optimizer.master_rounding=stochastic"],
            "critic.optimizer.master_rounding=stochastic is for bfloat16 masters: these are float32, so leave it out",
        ),
    ],
)
def test_impossible_settings_are_refused_before_anything_starts(load, overrides, message):
    with pytest.raises(UserError) as caught:
        load(*overrides)
    assert message in str(caught.value)
    assert any(str(caught.value).startswith(f"override {o!r}") for o in overrides)


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["train.row_len=100"], "override 'train.row_len=100': "),
        (["train.row_len=70", "rollout.max_response_len=8"], "override 'train.row_len=70', override 'rollout.max_resp"),
        (["train={prompts_per_step: 8, prompts_per_update: 3}"], "override 'train={prompts_per_step: 8, prompts_per_"),
        (["critic={warmup_steps: 9}", *PPO[:2], "train.steps=9"], "override 'critic={warmup_steps: 9}', override 'tr"),
        (["reward.name=code", "reward.workers=-1"], "override 'reward.workers=-1': "),
        (["reward.name=python"], "override 'reward.name=python': reward.path is required"),
    ],
)
def test_a_wrong_setting_is_blamed_on_what_set_it(load, overrides, blamed):
    unrelated = ["run_dir=elsewhere", "log.view=off", "train.compile_cache=off", "data.holdout=0.5"]
    with pytest.raises(UserError) as caught:
        load(*unrelated, *overrides)
    assert str(caught.value).startswith(blamed)
    assert not any(override in str(caught.value) for override in unrelated)


def test_a_wrong_setting_of_the_file_is_blamed_on_its_line(write):
    with pytest.raises(UserError, match=r"run\.yaml:\d+: train\.row_len=3 is shorter"):
        config.load(write(MINIMAL | {"train": {"row_len": 3}}), ["run_dir=elsewhere"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.warmup_steps=-1", "warmup_steps must be at least 0, got -1"),
        ("critic.clip=0", "clip must be positive, or null"),
        ("critic.optimizer.name=sgd", "critic.optimizer.name: unknown name 'sgd'"),
        ("critic.lr=1e-5", "critic.lr: unknown key. Did you mean"),
        ("advantage.gamma=1.5", "gamma = 1.5: must be at most 1"),
    ],
)
def test_bad_settings_of_a_critic_are_told_where_they_stand(load, override, message):
    with pytest.raises(UserError) as caught:
        load(*PPO, override)
    assert f"override '{override}'" in str(caught.value)
    assert message in str(caught.value)


def test_a_critic_takes_groups_of_one_and_leaves_the_policy_the_rest_of_the_updates(load):
    cfg = load(*PPO, "rollout.num_samples_per_prompt=1", "train.steps=10", "critic={warmup_steps: 4}")
    assert cfg.policy_updates == 6 * cfg.train.updates_per_step
    assert "adamw at lr 1e-05; the policy waits 4 steps" in description.describe(cfg)
    assert "none" in next(line for line in description.describe(load()).splitlines() if line.startswith("critic"))
    assert load().policy_updates == load().train.total_updates


@pytest.mark.parametrize(
    ("engine", "sampler", "profile"),
    [
        ("auto", "jax", "plain"),
        ("auto", "vllm", "cpu"),
        ("cpu", "jax", "cpu"),
        ("cuda", "jax", "cuda"),
        *((name, "vllm", name) for name in numerics.PROFILES),  # as a bridge elsewhere may ask for it
    ],
)
def test_auto_mirrors_vllm_where_vllm_samples_and_nothing_else_does_so_unasked(load, engine, sampler, profile):
    cfg = load(f"quant.engine={engine}", f"rollout.engine.name={sampler}")
    assert cfg.numerics.profile == profile
    assert cfg.quant.engine == engine


def test_the_resolved_config_of_a_run_reads_back(load, write):
    cfg = load(*PPO, "advantage.lam=0.9", "critic={path: x, optimizer: {name: muon, lr: 1.0e-4}}")
    assert config.load(write(config.to_yaml(cfg), "critic.yaml")) == cfg
    cfg = load(
        "reward={name: sum, terms: [{reward: {name: exact}}, {reward: {name: format}, coef: 0.1}]}",
        "quant.rules=[{match: 'layers.0', scheme: bf16}]",
        "loss.name=grpo",
        "optimizer.name=adamw",
        "rollout.engine.name=vllm",
        STAGES,
        "rollout.partial={over_provision: 1.5, chunk: 4}",
        "data.stages=[{weights: {a: 1, b: 2}, until: 3}, {weights: {b: 1}}]",
        "data.source={name: mix, parts: {a: {name: jsonl, path: x}, b: {name: parquet, path: y}}}",
        "eval.data={source: {name: jsonl, path: x}, template: raw}",
    )
    assert config.load(write(config.to_yaml(cfg), "dump.yaml")) == cfg


@pytest.mark.parametrize("key", schema.dotted_keys(config.RunConfig))
def test_every_key_of_the_schema_has_words_for_its_type(key):
    # What an error message would say of this key; an annotation the machinery does not know would show up as its repr.
    *section, name = key.split(".")
    for cls in sections(config.RunConfig, section):
        hints = schema.field_types(cls)
        if name in hints:
            assert "typing." not in schema.type_words(hints[name])


def sections(cls, path):
    classes = [cls]
    for part in path:
        found = []
        for owner in classes:
            hint = schema.field_types(owner).get(part)
            found.extend(nested for nested, _ in annotations.nested(hint) if hint is not None)
        classes = found
    return classes


CONFIGS = sorted(glob.glob(os.path.join(os.path.dirname(__file__), "..", "..", "configs", "*.yaml")))


def is_sft(path):
    with open(path, encoding="utf-8") as handle:
        return "out" in yaml.safe_load(handle)


@pytest.mark.parametrize("path", CONFIGS, ids=os.path.basename)
def test_every_config_file_is_valid(path):
    if is_sft(path):
        assert schema.load(sft.Config, path).train.updates > 0
    else:
        assert description.describe(config.load(path))
