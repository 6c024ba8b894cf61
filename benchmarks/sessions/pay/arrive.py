# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Makes a model of a GGUF file whose pieces still arrive: bit for bit what `qarl_jax.convert` writes, without a wait.

    python arrive.py PIECES SIZE MODEL

PIECES is a folder in which 000, 001, ... appear, each whole; SIZE, bytes of the file. MODEL is the folder that
`qarl_jax.convert` made elsewhere, with the header alone in place of the weights (`header`: the first bytes of its
model.safetensors) and `sha256` of all of it. Each tensor is dequantized once its bytes are there, by many processes.
MODEL/ready appears with the last; then the checksum is compared, and MODEL/checked or MODEL/damaged appears.
"""

import concurrent.futures
import hashlib
import json
import mmap
import os
import pathlib
import sys
import time

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize

NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ROWS = 8192  # of a large tensor, for one process


def renamed(name: str) -> str:
    stem, _, end = name.rpartition(".")
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{end}"
    _, number, part = stem.split(".")
    return f"model.layers.{number}.{NAMES[part]}.{end}"


def write(out: str, at: int, data: np.ndarray, kind) -> None:
    """Some rows of a tensor, as bfloat16."""
    torch.set_num_threads(1)
    values = torch.from_numpy(np.ascontiguousarray(dequantize(data, kind), np.float32)).to(torch.bfloat16)
    with open(out, "r+b") as file:
        file.seek(at)
        file.write(values.view(torch.int16).numpy().tobytes())


def main(pieces: pathlib.Path, size: int, model: pathlib.Path) -> None:
    gguf, out = model / "arriving.gguf", model / "model.safetensors"
    header = (model / "header").read_bytes()
    places = json.loads(header[8:])
    ends = max(one["data_offsets"][1] for name, one in places.items() if name != "__metadata__")
    out.write_bytes(header)
    os.truncate(out, len(header) + ends)
    gguf.touch()
    os.truncate(gguf, size)
    have, number, tensors, waiting, jobs = 0, 0, None, [], []
    with concurrent.futures.ProcessPoolExecutor(min(24, os.cpu_count() or 1)) as pool, gguf.open("r+b") as file:
        while have < size or waiting:
            piece = pieces / f"{number:03d}"
            if have < size:
                while not piece.exists():
                    time.sleep(0.2)
                file.seek(have)
                file.write(piece.read_bytes())
                file.flush()
                have, number = file.tell(), number + 1
            if tensors is None:  # the first piece holds names, types and places of all
                tensors = GGUFReader(gguf).tensors
                waiting = list(tensors)
            arrived = [t for t in waiting if t.data_offset + t.n_bytes <= have]
            waiting = [t for t in waiting if t.data_offset + t.n_bytes > have]
            for t in arrived:
                place = places[renamed(t.name)]
                rows = place["shape"][0] if len(place["shape"]) > 1 else 1
                data = t.data.reshape(rows, -1) if rows > 1 else t.data
                width = (place["data_offsets"][1] - place["data_offsets"][0]) // rows
                for row in range(0, rows, ROWS):
                    at = len(header) + place["data_offsets"][0] + row * width
                    jobs.append(pool.submit(write, str(out), at, np.array(data[row : row + ROWS]), t.tensor_type))
        for job in jobs:
            job.result()
    (model / "ready").touch()
    with out.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        right = hashlib.sha256(whole).hexdigest() == (model / "sha256").read_text().split()[0]
    gguf.unlink()
    (model / ("checked" if right else "damaged")).touch()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3]))
