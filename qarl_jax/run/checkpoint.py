# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: everything that a run needs to resume, bit for bit, written to disk atomically.

    <dir>/step_00000010/state/params/     one Orbax item per entry of the state, arrays by name
                              opt_state/
                        extra.json        data cursor, RNG seed, policy version, ...: any JSON of the caller
                        manifest.json     shape and dtype of every array; size and CRC-32 of every file, and its own.
                                          Written last.

How nothing is lost:

  * A step is written under `.saving-*` and renamed when complete. A process killed at any moment leaves the older steps
    as they were; its debris is swept by the next save.
  * Old steps are deleted only after a newer one is in place and has been read back.
  * Restoring the newest step checks every file first. One that is short, missing or altered is reported and passed over
    for the step before it, and kept: nobody deletes what may be needed for diagnosis.
  * A failed save (disk full, no permission) raises a UserError and removes only what it wrote itself.

Orbax moves the arrays (any sharding in, any sharding out, bit for bit). The step directories are ours, because Orbax's
manager can neither tell an altered array from a sound one nor fall back to an older step.

The processes of a multi-process run write into one shared folder: each its shards, the first process everything else. A
run with another number of processes reads equal bits. Two runs must not write to one directory; reading is always
allowed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import json
import logging
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from qarl_jax.optim.build import path_name
from qarl_jax.run import on_disk
from qarl_jax.run.on_disk import DamagedCheckpointError as DamagedCheckpointError
from qarl_jax.runtime import processes
from qarl_jax.typed_config.annotations import internal
from qarl_jax.types import UserError, at_least

log = logging.getLogger(__name__)

_SAVING = ".saving-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The section `checkpoint`: when to save, and what to keep.

    Attributes:
      every: steps between saves; 0: no schedule (a save only at the end or on Ctrl-C).
      at_end: save after the last step.
      keep: number of newest whole checkpoints to keep; null: all. A damaged one does not count, and stays.
      asynchronous: write in the background while training goes on; a failure is then raised at the next step. On a CPU
        this holds a copy of the state until it is written (not from a config).
      start_over: if a run has records but no whole checkpoint, begin at step 0 and rename the old records; false:
        refuse.
    """

    every: int = 50
    at_end: bool = True
    keep: int | None = 3
    asynchronous: bool = internal(True)
    start_over: bool = False

    def __post_init__(self) -> None:
        at_least(self, 0, "every", note="; 0 means never")
        at_least(self, 1, "keep", note="; null keeps all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored checkpoint: its step, the state entries that were asked for, and the JSON saved with them."""

    step: int
    state: dict[str, Any]
    extra: dict[str, Any]


class Checkpoints:
    """Saves and restores the checkpoints of one run.

    Example:
      checkpoints = Checkpoints("runs/a/checkpoints", Config(every=10))
      checkpoints.save(10, {"params": params, "opt_state": opt_state}, extra={"cursor": 640})
      back = checkpoints.restore({"params": params, "opt_state": opt_state})     # newest sound step
      back = checkpoints.restore({"params": abstract_params}, step=10)           # part of a step, for evaluation
    """

    def __init__(self, directory: str | os.PathLike[str], config: Config | None = None):
        """`config` None: the defaults, except that a save is on disk when it returns."""
        self.directory = Path(directory).absolute()
        self.config = config or Config(asynchronous=False)
        self._orbax: ocp.AsyncCheckpointer | None = None
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._read_whole: set[int] = set()  # steps whose every byte this process has written or compared

    # ---------------------------------------------------------------------------------------------------------- looking

    def steps(self) -> list[int]:
        """Lists the saved steps, oldest first. A folder is named when complete: one that lacks files is damaged."""
        if not self.directory.is_dir():
            return []
        found = [(on_disk.STEP.fullmatch(path.name), path) for path in self.directory.iterdir()]
        return sorted(int(match[1]) for match, path in found if match and path.is_dir())

    def must_have_saved(self, done: int) -> bool:
        """Tells whether the schedule must have put a checkpoint on disk after `done` steps."""
        # A save in the background is waited for by the one after it.
        return self.config.every > 0 and done > self.config.every * (2 if self.config.asynchronous else 1)

    def path(self, step: int) -> Path:
        """The directory of a step."""
        return self.directory / f"step_{step:08d}"

    def should_save(self, step: int) -> bool:
        """Tells whether the schedule asks for a checkpoint after `step`."""
        return self.config.every > 0 and step % self.config.every == 0

    def extra(self, step: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Returns (step, its saved JSON) of `step`, or of the newest step with readable JSON; None if there is none."""
        for candidate in self.steps()[::-1] if step is None else [step]:
            with contextlib.suppress(DamagedCheckpointError):
                return candidate, self._checked(candidate, {})
        return None

    # ----------------------------------------------------------------------------------------------------------- saving

    def save(self, step: int, state: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> None:
        """Saves a step. On return the caller may change or donate every array.

        Args:
          step: number of the step; an older checkpoint of this number is replaced.
          state: maps entry names to pytrees of arrays (jax or numpy).
          extra: JSON values, without NaN.

        Raises:
          UserError: the disk is full, the directory cannot be written. Earlier steps are untouched.
        """
        self.wait()
        text = json.dumps(dict(extra or {}), allow_nan=False)
        items = {name: {key: _array(leaf) for key, leaf in _named(name, tree).items()} for name, tree in state.items()}
        staging = self.directory / f"{_SAVING}{step:08d}-{processes.from_first(os.getpid)}"
        with processes.together(), self._explained(step, staging):
            if processes.is_first():
                self.directory.mkdir(parents=True, exist_ok=True)
                self._sweep()
                staging.mkdir()
        with processes.together(), self._explained(step, staging):
            self._start(staging, items)
        if self.config.asynchronous:
            self._writer = threading.Thread(target=self._finish_later, args=(step, staging, items, text))
            self._writer.start()
        else:
            with processes.together(), self._explained(step, staging):
                self._finish(step, staging, items, text)

    def wait(self) -> None:
        """Waits until a background save is on disk; raises the save's error on every process."""
        if self._writer is not None:
            with processes.together():
                self._join()

    def check(self) -> None:
        """Raises the error of a failed background save on every process, without waiting for a running one."""
        if self._writer is not None and processes.any_of(self._failure is not None):
            self.wait()

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def close(self) -> None:
        """Waits for a background save and releases Orbax's threads. The object may be used again."""
        self._close(self.wait)

    def _close(self, wait: Callable[[], None]) -> None:
        try:
            wait()
        finally:
            if self._orbax is not None:
                self._orbax.close()
                self._orbax = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        # With an error on its way out the other processes may be anywhere: nobody is asked.
        self._close(self.wait if kind is None else self._join)

    def _start(self, staging: Path, items: Mapping[str, dict[str, Any]]) -> None:
        arrays = {name: {key: x for key, x in flat.items() if x.size} for name, flat in items.items()}
        if self.config.asynchronous and jax.default_backend() == "cpu":
            # On CPU "device to host" is no copy at all, and a buffer donated to the next step would change underneath.
            arrays = jax.tree.map(lambda x: x.copy(), arrays)
        args = {name: ocp.args.StandardSave(flat) for name, flat in arrays.items() if flat}
        if args:
            self._handler().save(staging / "state", ocp.args.Composite(**args))

    def _finish(self, step: int, staging: Path, items: Mapping[str, dict[str, Any]], extra: str) -> None:
        self._handler().wait_until_finished()  # on the first process: until all have written their part
        if not processes.is_first():
            return
        on_disk.write(staging / "extra.json", extra)
        shapes = {
            name: {key: {"shape": list(x.shape), "dtype": str(x.dtype)} for key, x in flat.items()}
            for name, flat in items.items()
        }
        files = {str(path.relative_to(staging)): on_disk.fingerprint(path) for path in on_disk.files(staging)}
        manifest = {"format": on_disk.FORMAT, "step": step, "arrays": shapes, "files": files}
        on_disk.write(staging / "manifest.json", json.dumps(manifest | {"crc": on_disk.checksum(manifest)}))

        final = self.path(step)
        if final.exists():
            # Kept under another name until its successor is in place; a damaged one stays for good.
            sound = on_disk.is_sound(final)
            aside = on_disk.unused(final.with_name(f"{final.name}.{'replaced' if sound else 'damaged'}"))
            final.rename(aside)
            staging.rename(final)
            if sound:
                on_disk.delete(aside)
        else:
            staging.rename(final)
        self._read_whole.add(step)
        on_disk.sync(self.directory)
        self._retire()

    def _finish_later(self, step: int, staging: Path, items: Mapping[str, dict[str, Any]], extra: str) -> None:
        try:
            with self._explained(step, staging):
                self._finish(step, staging, items, extra)
        except BaseException as failure:
            self._failure = failure

    def _handler(self) -> ocp.AsyncCheckpointer:
        if self._orbax is None:
            _tell_failures_once()
            self._orbax = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler())
        return self._orbax

    def _drop_orbax(self) -> None:
        """After a failure: let the writer's threads end, and forget the error they would report again."""
        orbax, self._orbax = self._orbax, None
        if orbax is not None:
            with contextlib.suppress(Exception):
                orbax.close()

    @contextlib.contextmanager
    def _explained(self, step: int, staging: Path) -> Iterator[None]:
        """Removes a failed save's debris; turns what the user can fix into a UserError."""
        try:
            yield
        except BaseException as error:
            self._drop_orbax()
            if processes.is_first():
                shutil.rmtree(staging, ignore_errors=True)
            if not (reason := _reason(error)):
                raise
            kept = self.steps()
            raise UserError(
                f"Cannot save step {step} in {self.directory}: {reason}. "
                + (f"Earlier checkpoints are intact (steps {kept})." if kept else "There is no earlier checkpoint.")
            ) from error

    def _sweep(self) -> None:
        """Remove what a killed save or deletion left behind."""
        for path in self.directory.iterdir():
            if path.name.startswith((_SAVING, on_disk.DELETING)):
                shutil.rmtree(path, ignore_errors=True)

    def _retire(self) -> None:
        """Delete what is beyond `keep`. Only whole steps count, and a damaged one stays."""
        if self.config.keep is None:
            return
        newer = 0
        for step in reversed(self.steps()):
            # Sizes are compared every time, contents once in a process: reading all that is kept at every save is dear.
            if not on_disk.is_sound(self.path(step), contents=step not in self._read_whole):
                continue
            self._read_whole.add(step)
            if newer >= self.config.keep:
                on_disk.delete(self.path(step))
            newer += 1

    # -------------------------------------------------------------------------------------------------------- restoring

    def restore(self, abstract: Mapping[str, Any], *, step: int | None = None) -> Restored:
        """Restores a step, bit for bit, into the structure and sharding of `abstract`.

        Args:
          abstract: maps entry names to trees of arrays or ShapeDtypeStructs; a leaf without a sharding goes to the
            default device. Entries left out are not read.
          step: number of the step; None: the newest undamaged one, with a warning for each damaged one.

        Raises:
          UserError: there is no checkpoint, or its names, shapes or dtypes differ from `abstract`.
          DamagedCheckpointError: the given `step` is damaged, or all steps are.
        """
        self.wait()
        if step is not None:
            return self._restore(step, abstract)
        candidates = processes.from_first(self.steps)[::-1]
        if not candidates:
            raise UserError(self._nothing_here())
        for candidate in candidates:
            try:
                return self._restore(candidate, abstract)
            except DamagedCheckpointError as damage:
                log.warning("%s Falling back to the step before it; the damaged one is left in place.", damage)
        raise DamagedCheckpointError(f"Every checkpoint in {self.directory} is damaged (steps {candidates[::-1]}).")

    def _nothing_here(self) -> str:
        if not self.directory.exists():
            return f"There is no checkpoint directory {self.directory}."
        if not self.directory.is_dir():
            return f"{self.directory} is a file, not a directory of checkpoints."
        if (self.directory / "config.json").is_file():
            return (
                f"{self.directory} is a model folder, not a run: evaluate takes it as --model {self.directory}, with"
                " the --config of a run; train as model.path."
            )
        return f"{self.directory} holds no checkpoint (no complete step_* directory)."

    def _restore(self, step: int, abstract: Mapping[str, Any]) -> Restored:
        path = self.path(step)
        wanted = {name: _named(name, tree) for name, tree in abstract.items()}
        extra = processes.from_first(lambda: self._checked(step, wanted))
        state = {}
        for name, flat in wanted.items():
            target = {key: _target(leaf) for key, leaf in flat.items()}
            arrays = {key: jnp.zeros(t.shape, t.dtype, device=t.sharding) for key, t in target.items() if not t.size}
            with processes.together():
                arrays |= self._read(path / "state" / name, {key: t for key, t in target.items() if t.size})
            structure = jax.tree.structure(abstract[name])
            state[name] = jax.tree.unflatten(structure, [arrays[key] for key in flat])
        return Restored(step=step, state=state, extra=extra)

    def _checked(self, step: int, wanted: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The JSON of a step that is whole and holds what is wanted. Raises as `restore` does."""
        path = self.path(step)
        if not path.is_dir():
            raise UserError(f"{self.directory} has no step {step}; it has {self.steps() or 'none'}.")
        manifest = on_disk.read_manifest(path)
        for name, arrays in wanted.items():
            _check_layout(path, name, manifest["arrays"], arrays)
        others = tuple(f"state/{name}/" for name in manifest["arrays"] if name not in wanted)
        on_disk.verify(path, {file: mark for file, mark in manifest["files"].items() if not file.startswith(others)})
        return on_disk.load_json(path, "extra.json")

    def _read(self, item: Path, target: dict[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
        if not target:
            return {}
        try:
            with ocp.Checkpointer(ocp.StandardCheckpointHandler()) as reader:
                return reader.restore(item, args=ocp.args.StandardRestore(target))
        except jax.errors.JaxRuntimeError:
            raise  # out of device memory and the like: not the file's fault
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise DamagedCheckpointError(
                f"The checkpoint {item} cannot be read: {on_disk.first_line(error)}."
            ) from error


@functools.cache  # once a process
def _tell_failures_once() -> None:
    logging.getLogger("absl").addFilter(_is_news)
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        # The first write that fails ends Orbax's event loop. TensorStore's threads report later ones to it, in vain.
        trace = unraisable.exc_traceback
        if trace is None or trace.tb_frame.f_code.co_name != "call_soon_threadsafe":
            before(unraisable)

    sys.unraisablehook = hook


def _is_news(record: logging.LogRecord) -> bool:
    """Filters out tracebacks that Orbax's threads log: the same error is raised, and printed once."""
    return not (record.exc_info and f"{os.sep}orbax{os.sep}" in record.pathname)


def find(path: str | os.PathLike[str]) -> tuple[Checkpoints, int | None]:
    """Finds the checkpoints that `path` names: a run directory, its checkpoint directory, or one step of it.

    Returns:
      (checkpoints, step); step is None unless the path names a step.

    Raises:
      UserError: there is no checkpoint at `path`.
    """
    path = Path(path).absolute()
    match = on_disk.STEP.fullmatch(path.name)
    if match and path.is_dir():
        return Checkpoints(path.parent), int(match[1])
    for directory in (path, path / "checkpoints"):
        if Checkpoints(directory).steps():
            return Checkpoints(directory), None
    raise UserError(Checkpoints(path)._nothing_here())


# ---------------------------------------------------------------------------------------------------------------- parts


def _named(item: str, tree: Any) -> dict[str, Any]:
    """Maps names ("layers.kernel") to leaves, in tree order. Raises ValueError if two leaves have one name."""
    out: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path) or "value"
        if name in out:
            raise ValueError(f"Two leaves of {item} are called {name}.")
        out[name] = leaf
    return out


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _target(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _check_layout(path: Path, item: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if item not in saved:
        raise UserError(f"{path} holds no {item!r}; it holds {', '.join(sorted(saved)) or 'nothing'}.")
    have = saved[item]
    missing, surplus = [key for key in wanted if key not in have], [key for key in have if key not in wanted]
    if missing or surplus:
        raise UserError(
            f"{path} is a checkpoint of another model or optimizer: {item} "
            + "; ".join(
                part
                for part in (
                    f"lacks {_some(missing)}" if missing else "",
                    f"has {_some(surplus)} that this run does not know" if surplus else "",
                )
                if part
            )
            + "."
        )
    for key, leaf in wanted.items():
        for what, got, want in (
            ("shape", tuple(have[key]["shape"]), tuple(leaf.shape)),
            ("dtype", have[key]["dtype"], str(leaf.dtype)),
        ):
            if got != want:
                raise UserError(f"{path}: {item} {key} was saved with {what} {got}, but this run has {what} {want}.")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _reason(error: BaseException) -> str | None:
    """Explains a failed save that the user can mend, else None. TensorStore has errno in its text alone."""
    code, text = getattr(error, "errno", None), str(error)
    if on_disk.is_full(error):
        return "the disk is full"
    if code == errno.EFBIG or "File too large" in text:
        return "a file would be larger than is allowed (ulimit -f, or the file system's limit)"
    if code in (errno.EACCES, errno.EPERM, errno.EROFS) or "Permission denied" in text:
        return "no permission to write there"
    if code in (errno.ENOTDIR, errno.EEXIST):
        return "a file stands where a directory is needed"
    return None
