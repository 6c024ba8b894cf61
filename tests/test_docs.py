# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What the documents name is there: files, links, make targets, commands, settings, metrics, tests, extras, schemes.

The notebooks are run from top to bottom, on policies small enough for it.
"""

import ast
import contextlib
import copy
import dataclasses
import importlib
import json
import pathlib
import re
import shlex
import subprocess
import sys
import tomllib
import typing
from dataclasses import is_dataclass
from xml.etree import ElementTree

import pytest
import yaml

from examples import execute
from qarl_jax import data, loss, metrics, qat, quant, rewards, rollout, sft
from qarl_jax.models import MODELS
from qarl_jax.rewards import extract
from qarl_jax.run import config
from qarl_jax.typed_config import annotations, load
from tests.reference import tiny

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
# What a user reads from: the README, and the pages it sends to.
PAGES = ("README.md", *(f"docs/{name}.md" for name in ("operate", "install", "schemes", "promises", "adding")))
GUIDE = "".join((ROOT / page).read_text() for page in PAGES)
EXPERIMENT = ("experiments/alignment/README.md", "experiments/alignment/PLAN.md")
GENERATED = ("docs/algorithms.md", "docs/results.md", "docs/appendix/results.md")
SITE = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
# A day of the log names what the tree held on that day.
LOG = [page for page in SITE if re.search(r"log/\d", page)]
ROOMS = ("bridge/README.md", "configs/README.md", *(path.name for path in ROOT.glob("*.md")))
WRITTEN = sorted({*EXPERIMENT, *PAGES, *ROOMS, *SITE} - {*GENERATED, *LOG})
DOCUMENTS = sorted({*WRITTEN, *GENERATED, *LOG})
PRESENT = [page for page in WRITTEN if not page.startswith("docs/log/")]  # the log states its day
NOTEBOOKS = {path.stem: json.loads(path.read_text()) for path in sorted((ROOT / "examples").glob("*.ipynb"))}
VERBS = sorted({*re.findall(r"python -m qarl_jax\.(\w+)", "".join((ROOT / d).read_text() for d in DOCUMENTS))})
FOLDERS = ("qarl_jax", "assets", "bridge", "configs", "tests", "docs", "examples", "benchmarks", "experiments")


def text_of(document):
    return (ROOT / document).read_text()


def code_spans(text):
    """What stands between single backticks, code blocks left out."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def blocks(text, language):
    """The fenced blocks of a language ("": none)."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [block for name, block in fences if name == language]


def commands(text):
    """Lines of shell blocks, comments and continuations resolved, as lists of words."""
    for block in blocks(text, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                yield words


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_inside_the_repository_resolves(document):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text_of(document))
    missing = [link for link in links if "://" not in link and not (ROOT / document).parent.joinpath(link).exists()]
    assert not missing


def test_the_readme_names_all_that_may_differ_after_a_resume():
    paragraph = GUIDE.split("**Stopping and resuming.**")[1].split("\n\n")[0]
    for prefix in (metrics.TIME, metrics.PERF):
        assert f"`{prefix}*`" in paragraph


@pytest.mark.parametrize("document", PRESENT)
def test_every_file_named_in_the_text_exists(document):
    paths = {span for span in code_spans(text_of(document)) if span.split("/")[0] in FOLDERS and "/" in span}
    paths = {path.split(":")[0].split("::")[0] for path in paths if "<" not in path and " " not in path}
    # A reader of bridge/README.md stands in bridge/ or at the root.
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


@pytest.mark.parametrize("document", PRESENT)
def test_every_test_named_in_the_text_exists(document):
    named = {span for span in code_spans(text_of(document)) if re.fullmatch(r"test_\w+", span)}
    written = "".join(path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py")))
    assert not [name for name in sorted(named) if f"def {name}(" not in written]


@pytest.mark.parametrize("document", PRESENT)
def test_every_setting_named_in_the_text_exists(document):
    known = set(load.dotted_keys(config.RunConfig))
    sections = {key.split(".")[0] for key in known if "." in key}
    pattern = re.compile(r"([a-z]+(?:\.[a-z_]+)+)(=.*)?")
    named = {m.group(1) for span in code_spans(text_of(document)) if (m := pattern.fullmatch(span))}
    named = {name for name in named if name.split(".")[0] in sections and not name.endswith((".py", ".yaml", ".md"))}
    named -= {"quant.dot"}  # a function
    assert not [
        name for name in sorted(named) if name not in known and not any(k.startswith(f"{name}.") for k in known)
    ]


def sections(cls):
    """The dataclasses that a config of type `cls` is made of."""
    for hint in annotations.field_types(cls).values():
        items = [part for part in typing.get_args(hint) if isinstance(part, type)]  # of a tuple
        for nested, _ in (found for part in (hint, *items) for found in annotations.nested(part)):
            if nested is not cls:
                yield from (nested, *sections(nested))


def test_every_option_of_a_run_is_on_a_page():
    page, losses = text_of("docs/options.md"), text_of("docs/algorithms.md")
    for cls in {*sections(config.RunConfig)}:
        pages = losses if cls.__module__.startswith("qarl_jax.loss.") else "".join(b.__doc__ or "" for b in cls.__mro__)
        assert not [name for name in annotations.field_types(cls) if not re.search(rf"\b{name}\b", pages)], cls
        listed = [f"::: {base.__module__}.{base.__qualname__}\n" in page for base in cls.__mro__ if is_dataclass(base)]
        where = f"add `::: {cls.__module__}.{cls.__qualname__}` to docs/options.md"
        assert all(listed) or pages is losses, where


def test_every_metric_named_in_the_readme_is_logged():
    named = {s for s in code_spans(GUIDE) if re.fullmatch(r"(mismatch|quant|optim|proximal|reward|rollout)/\w+", s)}
    assert len(named) > 6
    sources = "".join(path.read_text() for path in sorted((ROOT / "qarl_jax").rglob("*.py")))
    assert not [name for name in sorted(named) if f'"{name}"' not in sources]


def test_every_make_target_named_exists():
    named = {words[1] for document in DOCUMENTS for words in commands(text_of(document)) if words[0] == "make"}
    named |= {span.split()[1] for span in code_spans(GUIDE) if span.startswith("make ")}
    assert {"quickstart", "test", "test-fast", "test-slow", "lint"} <= named
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    assert named <= targets


def test_every_verb_has_a_main_and_is_in_the_readme():
    verbs = {path.stem for path in (ROOT / "qarl_jax").glob("[a-z]*.py") if "__main__" in path.read_text()}
    assert {"train", "sft", "evaluate", "export", "plot", "doctor"} <= verbs
    assert not [verb for verb in sorted(verbs) if f"python -m qarl_jax.{verb}" not in GUIDE]


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("loss", "numerics")])
def test_every_command_named_shows_its_usage(verb, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"qarl_jax.{verb}").main(["--help"])
    assert stop.value.code == 0
    assert f"python -m qarl_jax.{verb}" in capsys.readouterr().out


def test_the_bridge_shows_its_usage_and_has_every_option_named():
    done = subprocess.run([sys.executable, "-m", "qarl_bridge", "--help"], capture_output=True, text=True, check=True)
    named = {
        word
        for words in commands(text_of("bridge/README.md"))
        if words[:3] == ["python", "-m", "qarl_bridge"]
        for word in words
        if word.startswith("--")
    }
    assert named == {"--socket", "--key-file", "--model"}
    assert not [option for option in named if option not in done.stdout]


@pytest.mark.parametrize("document", ["docs/operate.md", "bridge/README.md"])
def test_every_configuration_on_a_command_line_loads(document, tmp_path):
    key = tmp_path / "bridge.key"
    key.write_text("0" * 64)
    loaded = 0
    for words in commands(text_of(document)):
        if words[:2] != ["python", "-m"] or "--config" not in words:
            continue
        file = words[words.index("--config") + 1]
        file = str(ROOT / ("configs/quickstart.yaml" if file == "FILE" else file))
        overrides = [w for w in words[3:] if re.match(r"[a-z_.]+=", w)]
        if (verb := words[2].rpartition(".")[2]) in ("sft", "qat"):
            load.load({"sft": sft, "qat": qat.command}[verb].Config, file, overrides)
        else:
            config.load(file, overrides)
        loaded += 1
    assert loaded


def test_the_config_of_ones_own_loads(tmp_path):
    (file,) = [block for block in blocks(text_of("docs/operate.md"), "yaml") if block.startswith("run_dir:")]
    (tmp_path / "mine.yaml").write_text(file)
    assert config.load(tmp_path / "mine.yaml", []).run_dir == "runs/mine"


@pytest.mark.parametrize("document", ["docs/install.md", "bridge/README.md"])
def test_every_extra_named_exists(document):
    extras = {
        "qarl-jax": tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"],
        "bridge": tomllib.loads(text_of("bridge/pyproject.toml"))["project"]["optional-dependencies"],
    }
    named = re.findall(r'"(\./bridge|bridge|\.)\[([\w,-]+)\]"', text_of(document))
    assert named
    for where, names in named:
        known = extras["qarl-jax" if where == "." else "bridge"]
        assert set(names.split(",")) <= set(known), (where, names)
    if document == "docs/install.md":
        mentioned = {name for _, names in named for name in names.split(",")} | {"cuda12"}
        assert set(extras["qarl-jax"]) <= mentioned
        assert "`cuda12`" in text_of(document)


def test_the_tree_names_every_package_and_verb_and_nothing_else():
    tree = next(block for block in blocks(README, "") if block.startswith("qarl_jax/"))
    verbs = [path.name for path in (ROOT / "qarl_jax").glob("[a-z]*.py") if "__main__" in path.read_text()]
    packages = [f"{path.parent.name}/" for path in (ROOT / "qarl_jax").glob("*/__init__.py")]
    assert not [name for name in sorted(verbs + packages) if name not in tree]
    named = re.findall(r"\b([a-z_]+\.py)\b", tree)
    there = {path.name for path in (ROOT / "qarl_jax").rglob("*.py")}
    assert not [name for name in named if name not in there]


def test_tables_name_every_scheme_profile_and_registry():
    assert not [name for name in quant.scheme_names() if f"| `{name}` |" not in GUIDE]
    numerics = "".join(text_of(page) for page in SITE if page.startswith("docs/concepts/"))
    unnamed = [name for name in (*quant.PROFILES, *quant.scheme_names()) if f"`{name}`" not in numerics]
    assert not unnamed, f"no page of docs/concepts/ names {unnamed}: a scheme belongs into grids.md"
    for name, file in re.findall(r"`(\w+)` in `([\w/.]+\.py)`", text_of("docs/adding.md")):
        assert re.search(rf"^(class |def )?{name}\b", text_of(file), re.M), f"{file} does not define {name}"
    rows = {"LOSSES": loss.LOSSES, "SCHEMES": quant.SCHEMES, "MODELS": MODELS, "ENGINES": rollout.ENGINES}
    rows |= {"REWARDS": rewards.total.REWARDS}
    for name, registry in rows.items():
        assert registry
        (file,) = re.findall(rf"`{name}` in `([\w/.]+)`", GUIDE)
        assert f"\n{name}" in text_of(file)
        assert file in text_of("docs/adding.md")
    assert data.SOURCES


def test_the_page_of_training_before_rl_has_the_figures_of_its_record():
    page, folder = text_of("docs/qat.md"), ROOT / "experiments" / "qat" / "results"
    lines = [json.loads(line) for line in (folder / "smollm2_135m_h200.jsonl").read_text().splitlines()[1:]]
    figures = [x for line in lines for key in ("perplexity", "rounded", "trained", "distilled") if (x := line.get(key))]
    assert len(figures) == 15
    assert not [x for x in figures if (f"{x:,.0f}" if x > 1000 else f"{x:#.4g}") not in page]
    (scheme,) = {line["stages"][-1].partition(":")[0] for line in lines if "stages" in line}
    assert f"\n| method | `{scheme}` |" in page


def rows(document, heading):
    """The cells of the table below a heading, code marks and all, without its two first lines."""
    section = text_of(document).split(f"{heading}\n", 1)[1].split("\n#")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in section.splitlines() if line.startswith("|")][
        2:
    ]


def test_the_table_of_rewards_has_every_option_with_its_default():
    assert [name for name, *_ in rows("docs/rewards.md", "# Rewards")] == [
        f"`{name}`" for name in rewards.total.REWARDS
    ]
    told = [
        (reward, option.strip("`"), yaml.safe_load(default.strip("`")) if default else dataclasses.MISSING)
        for names, option, default, _ in rows("docs/rewards.md", "## Options")
        for reward in code_spans(names)
    ]

    def default_of(field):
        value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        return list(value) if isinstance(value, tuple) else value

    there = [
        (name, field.name, default_of(field))
        for name, cls in rewards.total.TERMS.items()
        for field in dataclasses.fields(cls)
    ]
    assert sorted(map(repr, told)) == sorted(map(repr, there))
    extractions = [name.strip("`") for name, _ in rows("docs/rewards.md", "## Where an answer is looked for")]
    assert sorted(extractions) == sorted(typing.get_args(extract.Extraction))


@dataclasses.dataclass(frozen=True)
class Rewarded:
    reward: rewards.RewardConfig


def test_every_reward_shown_loads(tmp_path):
    examples = blocks(text_of("docs/rewards.md"), "yaml")
    assert len(examples) == 5
    for example in examples:
        (tmp_path / "example.yaml").write_text(example)
        assert load.load(Rewarded, tmp_path / "example.yaml").reward


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_are_for_readers_of_the_repository_alone(document):
    assert not re.search(r"/work\b|/tmp/venv|\bTODO\b|\bFIXME\b|\bTBD\b", text_of(document))


# ---- the notebooks ---------------------------------------------------------------------------------------------------


def cells(notebook, kind="code"):
    return [cell for cell in NOTEBOOKS[notebook]["cells"] if cell["cell_type"] == kind]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_valid_and_installs_what_it_needs_first(name):
    notebook = NOTEBOOKS[name]
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    names = [cell["id"] for cell in notebook["cells"]]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in names)
    install, parameters = cells(name)[:2]
    assert install["metadata"]["tags"] == ["install"]
    # One text for all of them, but for the extras.
    assert "".join(install["source"]).replace("cuda13,vllm,", "") == "".join(cells("quickstart")[0]["source"])
    assert parameters["metadata"]["tags"] == ["parameters"]
    for cell in cells(name):
        ast.parse("".join(cell["source"]))
    for cell in cells(name, "markdown"):
        assert "".join(cell["source"]).strip()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_carries_outputs_if_it_needs_a_gpu(name):
    kinds = {output["output_type"] for cell in cells(name) for output in cell["outputs"]}
    assert kinds <= ({"stream", "execute_result"} if name == "gpu_vllm" else set())


def run_notebook(name, **parameters):
    """Runs the cells from top to bottom, the second with other values; returns what they defined."""
    own = cells(name)[1]
    assert {node.targets[0].id for node in ast.parse("".join(own["source"])).body} == set(parameters)
    return execute.execute(copy.deepcopy(NOTEBOOKS[name]), parameters)


@pytest.mark.slow
def test_the_quickstarts_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    file = tiny.World(tmp_path).command()[1]
    space = run_notebook("quickstart", CONFIG=file, OVERRIDES=[], SCHEMES=("w8a8", "w4a16:g32"), STEPS=3)
    pyplot.close("all")
    bf16, quantized = space["differences"].values()
    # The claim the notebook makes: the int4 learner is the sampler's policy, the bf16 learner is not.
    assert abs(quantized).max() < 1e-4 < abs(bf16).mean()
    assert len(space["history"]) == 3
    assert space["session"].engine.version == 3
    assert 0 < space["flips"] < 1


@pytest.mark.nightly
def test_the_notebook_of_rewards_and_environments_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["train.prompts_per_step=4", "train.prompts_per_update=2", "train.micro_batch_rows=4"]
    space = run_notebook("reward_and_environment", FOLDER="mine", OVERRIDES=small, STEPS=1)
    # What the text claims: lines cost, a number off by one pays a little, and wrong answers get a second try.
    assert [space["folder"] / name for name in ("config.yaml", "reward.py", "data.jsonl")] == space["files"]
    assert -0.1 < space["rewards"][0] < 1
    assert set(space["tried"]) == {1, 2}
    assert 0 < space["numbers"]["reward/mean"] < 1


@pytest.mark.slow
def test_the_notebook_of_mismatch_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    file = tiny.World(tmp_path).command()[1]
    overrides = ["model.dtype=bfloat16", "quant.engine=cpu"]
    space = run_notebook(
        "mismatch", CONFIG=file, OVERRIDES=overrides, SCHEME="w4a16:g32", WEIGHT="stacks.0.attn.q.kernel"
    )
    pyplot.close("all")
    # The claims of the text: of three learners the aligned one alone has the engine's bits, and then its log-probs.
    bf16, unrounded, aligned = space["layer"].values()
    assert aligned == 0 < unrounded < bf16
    unaligned, zero = space["k3"].values()
    assert zero < 1e-10 < 1e-6 < unaligned


@pytest.mark.nightly
def test_the_notebook_of_a_loss_runs_from_top_to_bottom(tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    file = tiny.World(tmp_path).command()[1]
    space = run_notebook("own_loss", CONFIG=file, OVERRIDES=[], STEPS=2)  # compares the loss with the hand's itself
    pyplot.close("all")
    tbpo, own = space["history"].values()
    assert tbpo[0]["reward/mean"] == own[0]["reward/mean"]  # the same first samples
    # TBPO alone clips upward where the advantage is negative; otherwise the two objectives are one.
    apart = max(abs(a["loss/total"] - b["loss/total"]) for a, b in zip(tbpo, own, strict=True))
    assert (apart > 1e-6) == any(numbers["clip/seq_neg_high"] > 0 for numbers in tbpo)
    assert "clip/seq_dropped" in tbpo[0]
    assert 0 < own[0]["own/ratio"] < 2


@pytest.mark.slow
def test_the_notebook_of_adapters_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tiny.World(tmp_path).command()[1]
    overrides = ["lora={rank: 8, alpha: 16}", "optimizer={name: adamw, lr: 1e-2}"]
    space = run_notebook("lora", CONFIG=file, OVERRIDES=overrides, FOLDER="adapters", STEPS=2)
    # The claims of the text: learner and sampler are one policy, adapters alone move, and the folder is that policy.
    assert space["before"][0] < 2e-6
    assert all(numbers["mismatch/max_abs"] < 2e-6 for numbers in space["history"])
    assert len(space["moved"]) == len(space["learned"]) == 14
    assert abs(space["loaded"] - space["trained"]).max() < 2e-6


@pytest.mark.slow
def test_the_notebook_of_a_tpu_runs_from_top_to_bottom(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    space = run_notebook("tpu", FOLDER="shapes", LAYERS=2, ROWS=4, LENGTH=512)
    kernels, products, loops = space["found"].values()
    assert kernels >= 3  # splash attention's forward and both halves of its backward
    assert products == 7  # of a layer: q, k, v, o, gate, up, down
    assert loops > 0


@pytest.mark.vllm
@pytest.mark.nightly
def test_the_notebook_of_a_gpu_runs_from_top_to_bottom_on_a_cpu(tmp_path, monkeypatch, capsys):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.chdir(tmp_path)
    overrides = [f"train.{name}=8" for name in ("prompts_per_step", "prompts_per_update", "micro_batch_rows")]
    advise = "--model Qwen3-0.6B --device h200"
    space = run_notebook(
        "gpu_vllm", CONFIG="quickstart_vllm", OVERRIDES=overrides, UNALIGNED="bf16", STEPS=2, ADVISE=advise
    )
    pyplot.close("all")
    bf16, aligned = space["differences"].values()  # the claim of the text: none, beside all
    assert abs(aligned).max() == 0 < abs(bf16).mean()
    assert [numbers["mismatch/exact"] for numbers in space["history"]] == [1.0, 1.0]
    assert space["session"].engine.version == 2
    assert space["code"] == 0


# ---- the site --------------------------------------------------------------------------------------------------------


def navigation(entries):
    """The pages of mkdocs.yml's nav, in order."""
    for entry in entries:
        value = next(iter(entry.values())) if isinstance(entry, dict) else entry
        if isinstance(value, list):
            yield from navigation(value)
        else:
            yield value


def test_pictures_are_drawn_for_light_and_dark_and_not_typed():
    for document in SITE:
        assert "/log/" in document or "──►" not in text_of(document), document
    drawn = sorted((ROOT / "docs/pictures").glob("*.svg"))
    assert {path.name for path in drawn} == set(
        re.findall(r"\(pictures/([\w.]+)\)", text_of("docs/tour.md") + text_of("docs/index.md"))
    )
    for path in drawn:
        ElementTree.parse(path)
        assert "@media (prefers-color-scheme: dark)" in path.read_text()


def is_assignment(line):
    with contextlib.suppress(SyntaxError, IndentationError):
        return any(isinstance(node, ast.Assign) for node in ast.parse(line).body)


def test_examples_in_docstrings_of_the_api_page_are_shown_as_code():
    """Their lines are indented after `inspect.cleandoc`, as by a text below them that is not."""
    for module in re.findall(r"^::: ([\w.]+)$", text_of("docs/api.md"), flags=re.MULTILINE):
        tree = ast.parse(pathlib.Path(importlib.import_module(module).__file__).read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                assert not [line for line in text.splitlines() if is_assignment(line)], module


def test_the_start_page_has_the_quickstarts_command():
    assert ["make", "quickstart"] in list(commands(text_of("docs/index.md")))


def test_every_page_is_in_the_navigation_once():
    pages = list(navigation(yaml.safe_load(text_of("mkdocs.yml"))["nav"]))
    assert sorted(f"docs/{page}" for page in pages) == SITE


def test_every_page_that_the_index_lists_is_there_and_none_is_left_out():
    named = set(re.findall(r"\]\(([\w/-]+\.md)\)", text_of("docs/index.md")))
    assert {f"docs/{page}" for page in named} == {*SITE} - {*LOG} - {"docs/index.md"} - {
        page for page in SITE if page.startswith("docs/appendix/")
    }


@pytest.mark.parametrize("document", SITE)
def test_every_heading_that_a_link_names_is_there(document):
    def slug(heading):
        return re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())

    for target, anchor in re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", text_of(document)):
        page = (ROOT / document).parent / target if target else ROOT / document
        headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
        assert anchor in {slug(heading) for heading in headings}, (target, anchor)


@pytest.mark.parametrize("day", LOG)
def test_a_page_of_the_log_is_a_day_that_the_index_names(day):
    date = pathlib.Path(day).stem
    assert text_of(day).startswith(f"# {date}\n")
    assert f"[{date}]({date}.md)" in text_of("docs/log/index.md")


# ---- length ----------------------------------------------------------------------------------------------------------


def words(document):
    return len(re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL).split())


def test_the_readme_is_short():
    assert words("README.md") <= 1200


@pytest.mark.parametrize("document", [p for p in SITE if p not in GENERATED and "/log/" not in p])
def test_a_page_answers_one_question_in_one_sitting(document):
    limit = {"docs/index.md": 600, "docs/tour.md": 600, "docs/concepts/engines.md": 3400}.get(document, 2400)
    assert words(document) <= limit


def test_from_readme_and_index_a_newcomer_knows_the_words():
    """Each word is explained where it is first used in bold, by its verb or its formula."""
    text = re.sub(r"\s+", " ", README + text_of("docs/index.md"))
    for word, part in {
        "k3": "exp(d) - 1 - d",
        "aligned": "rounds where the engine rounds",
        "proximal": "at the start of the step",
        "band": "narrow interval",
        "publish": "hands",
    }.items():
        assert re.search(rf"\*\*{word}\w*\*\*", text), word
        assert part in text, word


def test_no_function_outside_of_kernels_is_over_80_lines():
    def long(file):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        nodes = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, functions)]
        return [f"{file}:{node.lineno} {node.name}" for node in nodes if node.end_lineno - node.lineno >= 80]

    files = [*ROOT.glob("qarl_jax/**/*.py"), *ROOT.glob("bridge/qarl_bridge/**/*.py")]
    assert len(files) > 300
    assert [found for file in files if "kernels" not in file.parts for found in long(file)] == []
