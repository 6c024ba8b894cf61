# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes, verifies and deletes folders so that a process killed at any moment leaves only complete ones."""

from __future__ import annotations

import contextlib
import errno
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

from qarl_jax.runtime import locks
from qarl_jax.types import UserError

log = logging.getLogger(__name__)

DELETING = ".deleting-"
STEP = re.compile(r"step_(\d+)")
FORMAT = 4


@contextlib.contextmanager
def whole_folder(out: str | os.PathLike[str], option: str = "--out ", *, replaces: bool = False) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to `out` if the block ends without an error, and deleted otherwise.

    Args:
      option: the command-line option that names `out`, for error messages.
      replaces: whether to replace an `out` that is not empty, once the new folder is complete.

    Raises:
      UserError: `out` is in use, or cannot be written, or its disk is full.
    """
    target = Path(out)
    if not replaces and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{option}{target} exists and is not an empty folder; name another one.")
    staging, what = target.with_name(target.name + ".partial"), f"{option}{target}"
    with locks.owned(target, what, "name another folder"):
        with locks.writing(what):
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
        try:
            yield staging
            if replaces:
                shutil.rmtree(target, ignore_errors=True)
            elif target.exists():
                target.rmdir()
            os.replace(staging, target)
        except Exception as error:
            if not is_full(error):
                raise
            reason = getattr(error, "strerror", None) or first_line(error)
            raise UserError(f"{what} cannot be written: {reason}. Free some space.") from None
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def is_full(error: BaseException) -> bool:
    """Tells whether a write failed on a full disk. TensorStore and safetensors have errno in the error's text alone."""
    text = str(error)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
    return full or "No space left on device" in text or "quota exceeded" in text


class DamagedCheckpointError(UserError):
    """Raised for a damaged checkpoint; the message names the file and the damage."""


def files(root: Path) -> Iterator[Path]:
    """Lists all files below a folder, sorted."""
    return (path for path in sorted(root.rglob("*")) if path.is_file())


def sampled(folder: Path, *patterns: str) -> str:
    """Hashes name, size and 256 pieces of 4 KiB of each file of a folder that matches `patterns`; empty if none does.

    Trained or swapped weights differ nearly everywhere, so pieces of each file tell them apart.
    """
    hasher = hashlib.blake2b(digest_size=16)
    files = sorted(path for pattern in patterns for path in folder.glob(pattern))
    for path in files:
        size = path.stat().st_size
        hasher.update(f"{path.name} {size} ".encode())
        with path.open("rb") as file:
            for number in range(256):
                file.seek(max(0, size - 4096) * number // 255)
                hasher.update(file.read(4096))
    return hasher.hexdigest() if files else ""


def fingerprint(path: Path) -> list[int]:
    """Returns [size in bytes, CRC-32] of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            size, crc = size + len(block), zlib.crc32(block, crc)
    return [size, crc]


def verify(step: Path, files: Mapping[str, Sequence[int]], contents: bool = True) -> None:
    """Compares a step's files with their `fingerprint`s, or, without `contents`, with their sizes alone.

    Raises:
      DamagedCheckpointError: a file is missing or differs.
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
    """Tells whether every file of a checkpoint has its full size and, with `contents`, its checksum."""
    try:
        verify(step, read_manifest(step)["files"], contents)
    except DamagedCheckpointError:
        return False
    return True


def checksum(manifest: Mapping[str, Any]) -> int:
    """Returns the CRC-32 of the manifest's JSON."""
    return zlib.crc32(json.dumps(manifest).encode())


def read_manifest(step: Path) -> dict[str, Any]:
    """Reads a checkpoint's manifest, after comparing it with its checksum.

    Raises:
      DamagedCheckpointError: the manifest is missing, altered, or from another step (a copied or renamed folder).
      UserError: another version of qarl_jax wrote it.
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
    if crc != checksum(manifest):
        raise damaged
    if manifest["format"] != FORMAT:
        raise UserError(
            f"{step} was written by another version of qarl_jax (checkpoint format {manifest['format']}; this version"
            f" reads {FORMAT}). Use that version, or start a new run_dir."
        )
    return manifest


def load_json(step: Path, name: str) -> dict[str, Any]:
    """Reads a JSON file of a checkpoint. Raises DamagedCheckpointError if it is missing or not JSON."""
    try:
        return json.loads((step / name).read_text())
    except FileNotFoundError:
        raise DamagedCheckpointError(f"The checkpoint {step} is damaged: {name} is missing.") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"The checkpoint {step} is damaged: {name}: {first_line(error)}.") from error


def write(path: Path, text: str) -> None:
    """Writes a file and flushes it to the disk (fsync)."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync(directory: Path) -> None:
    """Flushes a directory (fsync), so that renames in it survive a power cut."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def delete(path: Path) -> None:
    """Deletes a folder. Renames it first, so that a half-deleted step is never taken for a checkpoint."""
    doomed = unused(path.with_name(DELETING + path.name))
    try:
        path.rename(doomed)
    except OSError as error:
        log.warning("Cannot delete the old checkpoint %s: %s.", path, first_line(error))
    shutil.rmtree(doomed, ignore_errors=True)


def unused(path: Path) -> Path:
    """Returns the path if nothing is there, else the path with a number appended."""
    for i in range(1_000_000):
        candidate = path if i == 0 else path.with_name(f"{path.name}-{i}")
        if not candidate.exists():
            return candidate
    raise AssertionError(path)


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, without its full stop, for use inside a sentence."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
