# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""`python -m qarl_jax.convert --gguf FILE... --out DIR`: a GGUF model as a Hugging Face folder of dense weights.

    python -m qarl_jax.convert --gguf model.gguf --out models/mine
    python -m qarl_jax.convert --gguf part1.bin part2.bin --sha256 1d96... --out models/mine

GGUF (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is llama.cpp's format: weights, tokenizer and chat
template in one file. Its quantized weights are dequantized here, and the result is an ordinary model that can be
trained and quantized again. transformers does the reading (the `gguf_file` argument of its `from_pretrained`), undoes
llama.cpp's order of q and k rows, and rebuilds the tokenizer. Several files are the parts of one, in the order given.
The weights are bfloat16, or float32 with `--dtype float32`. The folder appears whole or not at all. Needs torch and
`pip install 'qarl-jax[gguf]'`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any

from qarl_jax import models
from qarl_jax.run import on_disk
from qarl_jax.runtime import progress
from qarl_jax.types import UserError, command, entry_point

MAGIC = b"GGUF"
_BLOCK = 1 << 24
# Text that ends an answer in the chat formats of the supported families, beside the tokenizer's own end token.
_END_TEXTS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>")


def convert(
    files: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    sha256: str | None = None,
    dtype: str = "bfloat16",
) -> None:
    """Writes the model of a GGUF file as a Hugging Face folder: config, safetensors, tokenizer, end tokens.

    Args:
      files: the GGUF file, or its parts in order.
      out: folder to make; must not exist, or be empty.
      sha256: checksum of the whole file, in hexadecimal; None: not checked.
      dtype: of the weights written, "bfloat16" or "float32" (dequantized values are float32 before rounding).

    Raises:
      UserError: a file missing or not GGUF, another checksum, a folder in use, a missing package, an architecture that
        transformers or this project cannot read.
    """
    with on_disk.whole_folder(out) as staging, tempfile.TemporaryDirectory(dir=staging.parent) as scratch:
        joined = pathlib.Path(scratch) / "model.gguf"
        join(files, joined, sha256)
        _write(joined, staging, dtype)
        models.read_config(staging)


def join(files: Sequence[str | os.PathLike[str]], out: pathlib.Path, sha256: str | None = None) -> None:
    """Concatenates `files` into `out`; a single file is symlinked. Checks the GGUF magic bytes and the checksum.

    Raises:
      UserError: a file missing or empty, not GGUF, or another checksum than `sha256`.
    """
    paths = [pathlib.Path(file).absolute() for file in files]
    for path in paths:
        if not path.is_file():
            raise UserError(f"--gguf {path}: no such file.")
        if not path.stat().st_size:
            raise UserError(f"--gguf {path}: the file is empty.")
    with paths[0].open("rb") as first:
        if first.read(len(MAGIC)) != MAGIC:
            raise UserError(f"--gguf {paths[0]}: not a GGUF file (it does not begin with {MAGIC.decode()!r}).")
    digest = hashlib.sha256()
    if len(paths) == 1:
        out.symlink_to(paths[0])
        if sha256 is not None:
            with out.open("rb") as source:
                digest = hashlib.file_digest(source, "sha256")
    else:
        with out.open("wb") as whole:
            size = sum(path.stat().st_size for path in paths)
            with progress.task("joining the parts", size / 1e6, "MB") as task:
                for path in paths:
                    with path.open("rb") as source:
                        while block := source.read(_BLOCK):
                            digest.update(block)
                            whole.write(block)
                            task.done += len(block) / 1e6
    if sha256 is not None and digest.hexdigest() != sha256.lower():
        raise UserError(
            f"--gguf: the sha256 of the {len(paths)} file(s) is {digest.hexdigest()}, expected {sha256.lower()};"
            " a part is missing, damaged or out of order."
        )


def _write(gguf: pathlib.Path, out: pathlib.Path, dtype: str) -> None:
    """Reads `gguf` through transformers and writes the folder `out`."""
    try:
        # transformers' own messages about what is missing do not say how to get it.
        import accelerate as _accelerate  # noqa: F401
        import gguf as _gguf  # noqa: F401
        import transformers

        transformers.utils.logging.disable_progress_bar()  # of each of its stages; ours says what takes long
        dense: dict[str, Any] = {}
        if hasattr(transformers, "GgufConfig"):  # newer versions leave the weights packed unless told otherwise
            dense["quantization_config"] = transformers.GgufConfig(dequantize=True)
        with progress.task(f"dequantizing {gguf.stat().st_size / 1e6:,.0f} MB of weights"):
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                gguf.parent, gguf_file=gguf.name, dtype=dtype, **dense
            )
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise UserError(f"reading GGUF needs torch and two packages: pip install 'qarl-jax[gguf]' ({error}).") from None
    except Exception as error:  # gguf, tokenizers and transformers each raise what they like for a broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"transformers cannot read this GGUF file: {reason}") from error
    model.config.architectures = [type(model).__name__]
    with progress.task("writing the model folder"):
        model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    ends = [tokenizer.eos_token_id]
    ends += [i for text in _END_TEXTS if (i := tokenizer.get_vocab().get(text)) is not None and i not in ends]
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}, indent=2) + "\n")


@entry_point
@progress.shown()
def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=command("convert"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gguf", nargs="+", required=True, metavar="FILE", help="the GGUF file, or its parts in order")
    parser.add_argument("--out", required=True, metavar="DIR", help="model folder to write")
    parser.add_argument("--sha256", help="checksum of the whole file")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the weights written")
    args = parser.parse_args(argv)
    convert(args.gguf, args.out, sha256=args.sha256, dtype=args.dtype)
    print(args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
