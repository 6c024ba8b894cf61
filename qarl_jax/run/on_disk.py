# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Folders that are whole or not there at all: those that a command writes (`whole_folder`), and a checkpoint's, by the
manifest in it, with writing and deleting that a process killed at any moment leaves in order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qarl_jax.types import UserError

log = logging.getLogger(__name__)

DELETING = ".deleting-"
STEP = re.compile(r"step_(\d+)")
FORMAT = 4
"""3: moments stood in nested transformations, each with a counter of updates. 2: and a stack of layers was called a
segment. 1: and a manifest had no sum of its own."""

_OF_OPTIMIZER = re.compile(r"count$|(momentum|mu|nu)\.")


@contextlib.contextmanager
def whole_folder(out: str | os.PathLike[str], option: str = "--out ", *, replaces: bool = False) -> Iterator[Path]:
    """A folder to be filled, which becomes `out` where the block ends without an error, and vanishes otherwise.

    Args:
      option: names `out` in an error.
      replaces: whether `out` may hold something; it goes when the new one is whole.

    Raises:
      UserError: `out` is in use, or cannot be written.
    """
    target = Path(out)
    if not replaces and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{option}{target} exists and is not an empty folder; name another one.")
    staging = target.with_name(target.name + ".partial")
    try:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        raise UserError(
            f"{option}{target} cannot be written: {error.strerror or error}. Name a folder of yours."
        ) from None
    try:
        yield staging
        if replaces:
            shutil.rmtree(target, ignore_errors=True)
        elif target.exists():
            target.rmdir()
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


class DamagedCheckpointError(UserError):
    """A step that is on disk but not whole; the message says which file and what is wrong with it."""


def files(root: Path) -> Iterator[Path]:
    """All files below a folder, sorted."""
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def sampled(folder: Path, pattern: str) -> str:
    """A digest of the names, sizes and 256 pieces of 4 KiB of each file in a folder that matches; empty: none does.

    Weights that were trained or swapped differ nearly everywhere, so that some of each file tells them apart.
    """
    hasher, files = hashlib.blake2b(digest_size=16), sorted(folder.glob(pattern))
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(256):
                file.seek(max(0, size - 4096) * number // 255)
                hasher.update(file.read(4096))
    return hasher.hexdigest() if files else ""


def fingerprint(path: Path) -> list[int]:
    """[size, CRC-32] of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def verify(step: Path, files: Mapping[str, Sequence[int]], contents: bool = True) -> None:
    """Compares a step's files with their `fingerprint`s, or, without `contents`, with their sizes alone.

    Raises:
      DamagedCheckpointError: one is missing or another.
    """
    for name, (size, crc) in files.items():
        path = step / name
        if not path.is_file():
            raise DamagedCheckpointError(f"The checkpoint {step} is damaged: {name} is missing.")
        if path.stat().st_size != size:
            raise DamagedCheckpointError(
                f"The checkpoint {step} is damaged: {name} has {path.stat().st_size} bytes instead of {size}."
            )
        if contents and fingerprint(path)[1] != crc:
            raise DamagedCheckpointError(f"The checkpoint {step} is damaged: the contents of {name} have changed.")


def is_sound(step: Path, contents: bool = True) -> bool:
    """Tells whether every file is there in full and, with `contents`, unaltered."""
    try:
        verify(step, read_manifest(step)["files"], contents)
    except DamagedCheckpointError:
        return False
    return True


def checksum(manifest: Mapping[str, Any]) -> int:
    """The manifest's own sum: CRC-32 of its JSON."""
    return zlib.crc32(json.dumps(manifest).encode())


def read_manifest(step: Path) -> dict[str, Any]:
    """The manifest, its own sum checked first: what an altered one says of model or format would mislead.

    Raises:
      DamagedCheckpointError: it is missing, altered, or that of another step, whose folder was copied or renamed.
      UserError: a later version of this program wrote it.
    """
    manifest = _whole_manifest(step)
    named = STEP.fullmatch(step.name)
    if named and manifest.get("step") != int(named[1]):
        raise DamagedCheckpointError(
            f"The checkpoint {step} is damaged: its manifest is that of step {manifest.get('step')}, so the folder was"
            " copied or renamed. Give it its own name."
        )
    return manifest


def _whole_manifest(step: Path) -> dict[str, Any]:
    manifest = load_json(step, "manifest.json")
    damaged = DamagedCheckpointError(f"The checkpoint {step} is damaged: the contents of manifest.json have changed.")
    if not isinstance(manifest, dict):
        raise damaged
    crc = manifest.pop("crc", None)
    if manifest.get("format") == 1 and crc is None:  # written before manifests had a sum
        if not all(isinstance(manifest.get(key), dict) for key in ("arrays", "files")):
            raise damaged
        return manifest
    if crc != checksum(manifest):
        raise damaged
    if manifest["format"] > FORMAT:
        raise UserError(f"{step} has checkpoint format {manifest['format']}; this version reads up to {FORMAT}.")
    return manifest


def stored_name(name: str, number: int, saved: Sequence[str]) -> str:
    """Names an array in a checkpoint of that format, whose entry has arrays with the names `saved`."""
    stored = name if number >= 3 else name.replace("stacks.", "segments.")
    if number >= 4 or not _OF_OPTIMIZER.match(stored):
        return stored
    return next((other for other in saved if other.endswith("." + stored)), stored)


def load_json(step: Path, name: str) -> dict[str, Any]:
    """A JSON file of a step; DamagedCheckpointError if it is missing or no JSON."""
    try:
        return json.loads((step / name).read_text())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"The checkpoint {step} is damaged: {name} is missing.") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"The checkpoint {step} is damaged: {name}: {first_line(error)}.") from error


def write(path: Path, text: str) -> None:
    """Writes a file that is on the disk when this returns."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Make renames survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Rename first, so that a half-deleted step is never taken for a checkpoint."""
    doomed = unused(path.with_name(DELETING + path.name))
    try:
        path.rename(doomed)
    except OSError as error:
        log.warning("Cannot delete the old checkpoint %s: %s.", path, first_line(error))
    shutil.rmtree(doomed, ignore_errors=True)


def unused(path: Path) -> Path:
    """The path, or, where something is there, the path with a number behind it."""
    for i in range(1_000_000):
        candidate = path if i == 0 else path.with_name(f"{path.name}-{i}")
        if not candidate.exists():
            return candidate
    raise AssertionError(path)


def first_line(error: BaseException) -> str:
    """Words an error for the middle of a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
