# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that only a GPU can run: what of them a CPU can hold to account."""

import importlib.util
import json
import os
import pathlib
import re
import tarfile

import jax
import numpy as np
import pytest

from qarl_jax.rollout.vllm.engine import Config
from tests.reference import tiny_policies

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


def load(name):
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_gpu_linears_compares_enough_cases_and_refuses_a_cpu(capsys):
    gpu = load("gpu_linears")
    args = gpu.build_parser().parse_args([])
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes]
    cases = gpu.cases(args.schemes, shapes, args.rows)
    w8a8 = [c for c in cases if c[0] == "w8a8"]
    assert len(w8a8) >= 24
    assert len(set(w8a8)) == len(w8a8)
    assert sum(with_bias for *_, with_bias in w8a8) >= 12
    assert gpu.main([]) == 2
    assert "GPU" in capsys.readouterr().err


@pytest.mark.slow
def test_the_learners_half_of_gpu_linears_runs_here():
    gpu = load("gpu_linears")
    for scheme in gpu.PROMISED:
        w, x, bias = gpu.inputs(256, 128, 5, 0)
        y, qtensor = gpu.learner(scheme, w, x, bias)
        assert y.shape == (5, 128)
        assert isinstance(qtensor.codes, np.ndarray)
        exact = x.astype(np.float32) @ w.astype(np.float32).T + bias.astype(np.float32)
        assert np.linalg.norm(y.astype(np.float32) - exact) < 0.2 * np.linalg.norm(exact)


def test_a_broken_promise_is_counted_per_scheme():
    gpu = load("gpu_linears")
    case = {"max_ulp": 1.0, "relative": 1e-5, "count": 1000}
    results = [case | {"scheme": "w8a8", "equal": 1.0}, case | {"scheme": "fp8", "equal": 0.9995}]
    rows, broken = gpu.summarize(results)
    assert not broken
    assert [row["promise_kept"] for row in rows] == [True, True]
    rows, broken = gpu.summarize([*results, case | {"scheme": "w8a8", "equal": 0.999}])
    assert broken
    assert rows[0]["bit_equal_cases"] == 1


def test_publish_offers_what_the_config_offers():
    publish = load("publish")
    args = publish.build_parser().parse_args(["--shapes", "8b", "--layers", "2", "--schemes", "w4a16"])
    assert (args.layers, args.schemes) == (2, ["w4a16"])
    for name in ("transport", "readback"):
        assert getattr(args, name) == getattr(Config(), name)
    apart = publish.build_parser().parse_args(["--transport", "nccl", "--engine-device", "1"])
    assert Config(transport=apart.transport, visible_gpus=apart.engine_device).has_own_gpu
    with pytest.raises(SystemExit, match="exclude each other"):
        publish.main(["--model", "x", "--shapes", "tiny"])


@pytest.mark.slow
def test_publish_makes_policies_of_the_named_shapes_and_other_versions_of_them():
    publish = load("publish")
    weights = publish.shaped("tiny", 1, "w8a8", "cpu")
    other = publish.moved(tiny_policies.policy("w8a8"), 1.01)
    before = tiny_policies.policy("w8a8")
    assert weights.qweights is None  # made when it is published, and held by nobody else
    assert jax.tree.leaves(publish.moved(weights, 1.0).qweights)[0].shape[0] == 1
    pairs = zip(jax.tree.leaves(other.qweights), jax.tree.leaves(before.qweights), strict=True)
    assert any(not np.array_equal(a, b) for a, b in pairs)
    assert publish.rss_bytes(os.getpid()) > 10 << 20
    assert publish.gpu_bytes() is None or publish.gpu_bytes() > 0
    assert publish.copy_seconds(1 << 20, on_gpu=False) > 0


def test_recorded_results_name_their_command():
    for path in sorted((FOLDER / "results").glob("publish*.json")):
        record = json.loads(path.read_text())
        assert record["command"].startswith(("python benchmarks/publish.py", "python -m benchmarks.publish")), path
        assert record["results"], path


def spelled_out(name):
    """ "step_{two,four}.json" -> both."""
    braces = re.search(r"\{([^}]*)\}", name)
    if braces is None:
        return {name}
    begin, end = name[: braces.start()], name[braces.end() :]
    return {found for part in braces[1].split(",") for found in spelled_out(begin + part + end)}


def test_a_raw_result_stands_behind_a_page_or_is_in_the_archive_and_its_index():
    results = FOLDER / "results"
    pages = {path for folder in ("docs", "experiments") for path in (FOLDER.parent / folder).rglob("*.md")}
    text = "".join(path.read_text() for path in pages if path.parent.name != "log")
    named = {name for found in re.findall(r"[\w{},.-]+\.jsonl?\b", text) for name in spelled_out(found)}
    kept = {path.name for path in results.iterdir()} - {"README.md", "archive.tar.xz"}
    assert not sorted(kept - named)
    with tarfile.open(results / "archive.tar.xz") as archive:
        assert archive.getnames() == re.findall(
            r"^\| `([\w.-]+)` \|", (results / "README.md").read_text(), re.MULTILINE
        )
