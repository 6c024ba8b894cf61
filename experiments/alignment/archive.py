# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""What leaves the machine: the raw results of every run, and the state that the next machine goes on from.

Results (`pack`): one .tar.xz with, for every run, metrics.jsonl, eval.jsonl, histograms.jsonl, test.json, done.json or
failed.json, base.json (hash of the policy it started from) and run.json (config, versions, device; no host names, paths
or command lines), and the base's hash and evaluation. Members are <scale>/<path in the work folder>. Packing adds to
what the file holds: a run replaces one of the same name that has no more steps. All runs of a scale start from one
base; one of another base is refused. A run without a hash of its own has its archive's.

State (`save_state`): the work folder in parts of a limited size and number (`--part-mib`, `--parts`), for a link or a
store that limits them. First everything small and the policy; then the newest checkpoint of each unfinished run, the
most advanced first, as far as it fits; what does not fit is named, and its run begins anew. Checkpoints of complete
and of tested runs stay behind.
"""

from __future__ import annotations

import io
import json
import lzma
import pathlib
import tarfile
from collections.abc import Iterable
from typing import Any

from experiments.alignment import arms
from qarl_jax.types import UserError

FILES = ("metrics.jsonl", "eval.jsonl", "histograms.jsonl", "test.json", "done.json", "failed.json", "base.json")
RECORDS = ("metrics.jsonl", "failed.json")
"""A folder with one of these is a run; one that diverged in its first step has only the second."""
ENVIRONMENT = ("JAX_DEFAULT_MATMUL_PRECISION", "XLA_FLAGS")
"""Of a run's variables, those that change its numbers; the others are paths."""
PART_BYTES = 15 * 2**20
MOST_PARTS = 8
LIMIT_BYTES = 20 * 10**6
"""The results are kept in git."""


# ---- results -------------------------------------------------------------------------------------------------------


def facts(run: dict[str, Any]) -> dict[str, Any]:
    """What run.json says of how a run was made, without the machine's names and paths."""
    kept = ("devices", "git", "versions", "cpus", "time")
    settings = {key: value for key, value in run["config"].items() if key != "run_dir"}
    settings["model"] = {key: value for key, value in settings["model"].items() if key != "path"}
    starts = []
    for start in run["starts"]:
        known = {k: v for k, v in start.get("environment", {}).items() if k in ENVIRONMENT}
        starts.append({k: start[k] for k in kept if k in start} | ({"environment": known} if known else {}))
    return {"config": settings, "starts": starts}


def read(path: pathlib.Path) -> dict[str, bytes]:
    """Members of an archive; empty where there is none.

    Raises:
      UserError: it is not a .tar.xz.
    """
    if not path.exists():
        return {}
    try:
        with tarfile.open(path, "r:xz") as tar:
            found = ((member.name, tar.extractfile(member)) for member in tar if member.isfile())
            return {name: file.read() for name, file in found if file is not None}
    except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
        raise UserError(f"{path}: not a readable .tar.xz ({error}).") from None


def collect(work: pathlib.Path, scale: str) -> dict[str, bytes]:
    """Members for what the work folder holds."""
    out = {}
    for name in ("base.json", "base_test.json"):
        if (work / name).exists():
            out[f"{scale}/{name}"] = (work / name).read_bytes()
    found = {path.parent for kind in ("runs", "timing") for file in RECORDS for path in (work / kind).rglob(file)}
    for run in sorted(found):
        name = f"{scale}/{run.relative_to(work)}"
        out |= {f"{name}/{file}": (run / file).read_bytes() for file in FILES if (run / file).exists()}
        out[f"{name}/run.json"] = (json.dumps(facts(json.loads((run / "run.json").read_text()))) + "\n").encode()
    return out


def run_names(members: Iterable[str]) -> set[str]:
    """The runs among an archive's members, as "cpu/runs/bf16/1_bf16_grpo/seed0"."""
    return {name.rpartition("/")[0] for name in members if name.endswith(tuple(f"/{file}" for file in RECORDS))}


def merge(old: dict[str, bytes], new: dict[str, bytes]) -> dict[str, bytes]:
    """Both; of a run that both have, the one with more steps, and of equal ones the new one.

    Raises:
      UserError: runs of one scale started from different bases.
    """
    check_bases(old, new)

    def steps(members: dict[str, bytes], run: str) -> int:
        return members.get(f"{run}/metrics.jsonl", b"").count(b"\n")

    runs = run_names(new)
    worse = {run for run in runs if steps(old, run) > steps(new, run)}
    better = runs - worse
    kept = {name: text for name, text in old.items() if name.rpartition("/")[0] not in better}
    return kept | {name: text for name, text in new.items() if name.rpartition("/")[0] not in worse}


def check_bases(*archives: dict[str, bytes]) -> None:
    """All runs of a scale must have started from one base.

    Raises:
      UserError: there are two.
    """
    found: dict[str, dict[str, str]] = {}
    for members in archives:
        bases = {f"{scale}/base.json" for scale in arms.SCALES} & set(members)
        for name in [*sorted(run_names(members)), *bases]:
            scale = name.partition("/")[0]
            record = members.get(f"{name}/base.json", members.get(f"{scale}/base.json", b"{}"))
            sha256 = json.loads(record).get("sha256", "an unknown one")
            found.setdefault(scale, {}).setdefault(sha256, name)
    for scale, policies in found.items():
        if len(policies) > 1:
            each = ", ".join(f"{name} from {sha256}" for sha256, name in policies.items())
            raise UserError(
                f"{scale}: results of different policies do not go into one archive: {each}. Pack them into another"
                " file; of an unknown one, --base in its work folder records the hash."
            )


def pack(work: pathlib.Path, path: pathlib.Path, scale: str) -> int:
    """Adds the work folder's results to the archive at `path`; returns the number of runs in it now.

    Raises:
      UserError: it would exceed 20 MB, or mix runs that started from different bases.
    """
    members = merge(read(path), collect(work, scale))
    packed = compress(members)
    if len(packed) > LIMIT_BYTES:
        raise UserError(f"{path}: the results take {len(packed) / 1e6:.1f} MB, more than {LIMIT_BYTES / 1e6:.0f} MB.")
    fresh = path.with_name(path.name + ".new")
    fresh.write_bytes(packed)
    fresh.replace(path)
    return len(run_names(members))


def compress(members: dict[str, bytes]) -> bytes:
    """A .tar.xz of the members, a function of them alone (names in order, no times or owners)."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name in sorted(members):
            entry = tarfile.TarInfo(name)
            entry.size = len(members[name])
            tar.addfile(entry, io.BytesIO(members[name]))
    return lzma.compress(raw.getvalue(), preset=9)


# ---- state ---------------------------------------------------------------------------------------------------------


def save_state(work: pathlib.Path, out: pathlib.Path, part_bytes: int = PART_BYTES, most: int = MOST_PARTS) -> None:
    """Writes <out>/state.00, state.01, ... See the module's text.

    Raises:
      UserError: what is needed in any case does not fit.
    """
    out.mkdir(parents=True, exist_ok=True)
    for stale in out.glob("state.*"):
        stale.unlink()
    files = [p for p in sorted(work.rglob("*")) if p.is_file() and not p.name.startswith(".")]
    needed = [p for p in files if not {"checkpoints", "xla_cache"} & set(p.relative_to(work).parts)]
    packed = [_chunk(work, needed)]
    room = part_bytes * most - len(packed[0]) - 8
    if room < 0:
        raise UserError(f"{work}: what must be kept takes {len(packed[0]) / 2**20:.0f} MiB, more than fits.")
    for name, group in _optional(work):
        chunk = _chunk(work, group)
        if len(chunk) + 8 <= room:
            packed.append(chunk)
            room -= len(chunk) + 8
        else:
            print(f"{name} ({len(chunk) / 2**20:.0f} MiB) does not fit and stays behind")
    # Each chunk is a .tar.xz of its own behind its length, 8 bytes: tar files one after the other are not one tar file.
    whole = b"".join(len(chunk).to_bytes(8, "little") + chunk for chunk in packed)
    for number, start in enumerate(range(0, len(whole), part_bytes)):
        (out / f"state.{number:02d}").write_bytes(whole[start : start + part_bytes])


def load_state(work: pathlib.Path, folder: pathlib.Path) -> None:
    """Unpacks what `save_state` wrote into the work folder, over what is there.

    Raises:
      UserError: there are no parts, or one is missing.
    """
    parts = sorted(folder.glob("state.*"))
    if not parts:
        raise UserError(f"{folder}: no state.00 here; name the folder that --save-state wrote.")
    whole, at = b"".join(part.read_bytes() for part in parts), 0
    while at < len(whole):
        size = int.from_bytes(whole[at : at + 8], "little")
        chunk = whole[at + 8 : at + 8 + size]
        if len(chunk) < size:
            raise UserError(f"{folder}: a part is missing or cut off; copy all of state.00 and so on.")
        with tarfile.open(fileobj=io.BytesIO(chunk), mode="r:xz") as tar:
            tar.extractall(work, filter="data")
        at += 8 + size


def _chunk(work: pathlib.Path, files: Iterable[pathlib.Path]) -> bytes:
    return compress({str(path.relative_to(work)): path.read_bytes() for path in files})


def _optional(work: pathlib.Path) -> Iterable[tuple[str, list[pathlib.Path]]]:
    """The compile cache, then the newest checkpoint of every unfinished run, the most advanced run first."""
    cache = [path for path in sorted((work / "xla_cache").rglob("*")) if path.is_file()]
    if cache:
        yield "the compile cache", cache
    steps = []
    for folder in (work / "runs").glob("*/*/seed*"):
        saved = sorted(folder.glob("checkpoints/step_*/manifest.json"))
        if saved and not any((folder / file).exists() for file in ("done.json", "test.json")):
            steps.append((saved[-1].parent.name, str(folder.relative_to(work)), saved[-1].parent))
    for _, name, step in sorted(steps, reverse=True):
        yield f"the checkpoint of {name}", [path for path in sorted(step.rglob("*")) if path.is_file()]
