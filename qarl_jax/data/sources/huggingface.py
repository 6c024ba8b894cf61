# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts from a Hugging Face data set, by name or folder (`pip install 'qarl-jax[data]'`).

    data: {source: {name: huggingface, path: openai/gsm8k, subset: main, split: train}}

A path is a name on the Hub, a folder that `save_to_disk` wrote, or a folder of files (parquet, jsonl, csv). A machine
without a network takes what `hf download --repo-type dataset NAME` left in its cache. Columns are those of `files.py`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import Any

from qarl_jax.data.sources import files
from qarl_jax.types import AbsentError, UserError

_SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk writes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(files.Rows):
    """A data set of the `datasets` library.

    Attributes:
      path: a name on the Hub such as openai/gsm8k, or a folder.
      subset: its configuration, such as main; empty: the only one.
      split: train, test, ..., or a slice such as train[:1000].
      revision: commit or tag on the Hub; empty: the newest.
      streaming: read the first `limit` rows as they arrive, and keep no file.
    """

    path: str
    subset: str = ""
    split: str = "train"
    revision: str = ""
    streaming: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.streaming and not self.limit:
            raise UserError("streaming=true needs limit: the number of rows to read; without it leave streaming out.")

    def parts(self) -> Iterator[tuple[str, files.Numbered]]:
        """Yields once the name that begins the prompts' uids, and the rows."""
        name = "-".join(filter(None, (os.path.basename(self.path.rstrip("/")), self.subset, self.split)))
        yield name, self._rows()

    def _rows(self) -> files.Numbered:
        rows, number = iter(_opened(self)), 0
        while True:
            try:
                row = next(rows, None)
            except Exception as error:  # of files that it reads only now
                raise _told(self, error) from None
            if row is None:
                return
            number += 1
            if not isinstance(row, dict):
                raise UserError(f"{self.path}: row {number} is no object with columns.")
            yield number, f"{self.path}: row {number} of {self.split}", row


def _opened(cfg: Config) -> Any:
    try:
        import datasets
        import huggingface_hub
    except ImportError:
        raise AbsentError(f"{cfg.path}: a Hugging Face data set needs: pip install 'qarl-jax[data]'.") from None
    options: dict[str, Any] = {"name": cfg.subset or None, "split": cfg.split, "streaming": cfg.streaming}
    datasets.disable_progress_bars()
    try:
        if any(os.path.exists(os.path.join(cfg.path, name)) for name in _SAVED):
            found = datasets.load_from_disk(cfg.path)
            return found[cfg.split] if isinstance(found, datasets.DatasetDict) else found
        if os.path.isdir(cfg.path):
            return datasets.load_dataset(cfg.path, **options)
        try:
            return datasets.load_dataset(cfg.path, revision=cfg.revision or None, **options)
        except ConnectionError as error:  # what `hf download` left here
            try:
                folder = huggingface_hub.snapshot_download(
                    cfg.path, repo_type="dataset", revision=cfg.revision or None, local_files_only=True
                )
            except Exception:
                raise error from None
            return datasets.load_dataset(folder, **options)
    except Exception as error:  # a library of many kinds of error
        raise _told(cfg, error) from None


def _told(cfg: Config, error: Exception) -> UserError:
    reason = str(error).strip().split("\n")[0] or type(error).__name__
    kind = AbsentError if isinstance(error, ConnectionError | FileNotFoundError) else UserError
    return kind(f"{cfg.path}: cannot read the data set: {reason.rstrip('.')}. See the source's path, subset and split.")
