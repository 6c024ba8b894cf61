# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Publishing over a socket: the bytes that changed, against all of them.

    python -m benchmarks.publish_delta --shape 8b --layers 8 --rates 0 1e-7 1e-5 1e-3 1e-2 1e-1

A version is laid out as `w4a16` lays out that many layers of a Qwen3: codes of four bits, a bfloat16 scale per 128 of
them, norms. Every code, and every last bit of a scale, changes with the given probability. The version goes to a bridge
of its own process (the toy engine, which holds the tensors and computes nothing) over TCP on this machine, encrypted.

    find      comparing the two versions and writing down what changed, once for all engines
    send      through the socket, until the bridge has put the version together and checked every fingerprint
    apply     of that: writing the changes into a copy of the version before (made while that one serves, from the third
              version on; the second one's is made here)
    verify    of that: the fingerprints of what has changed
    zlib      for comparison: the XOR of both versions under zlib at level 1, of a part of them
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from qarl_bridge.client import sender
from qarl_bridge.protocol import messages
from qarl_bridge.protocol.messages import BridgeError

from benchmarks.shapes import SIZES

CONFIG = {"model_type": "qwen3", "vocab_size": 512, "quantization_config": {"format": "pack-quantized"}}
ZLIB_BYTES = 16 << 20


def layer_tensors(shape: str, layers: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random tensors of the layers, by name: packed codes, scales, norms."""
    size = SIZES[shape]
    hidden, inter, head_dim = size["hidden"], size["inter"], size.get("head_dim", 128)
    q, kv = size["heads"] * head_dim, size["kv"] * head_dim
    linears = {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inter, hidden), "mlp.up_proj": (inter, hidden),
        "mlp.down_proj": (hidden, inter),
    }  # fmt: skip
    named: dict[str, np.ndarray] = {}
    for layer in range(layers):
        for name, (n, k) in linears.items():
            place = f"model.layers.{layer}.{name}"
            named[f"{place}.weight_packed"] = rng.integers(-(2**31), 2**31, (n, k // 8), dtype=np.int32)
            named[f"{place}.weight_scale"] = rng.uniform(0.01, 0.02, (n, k // 128)).astype(ml_dtypes.bfloat16)
        for name in ("input_layernorm", "post_attention_layernorm"):
            named[f"model.layers.{layer}.{name}.weight"] = rng.normal(1, 0.1, hidden).astype(ml_dtypes.bfloat16)
    return named


def changed(named: dict[str, np.ndarray], rate: float, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """A version in which codes and scales have moved to a neighbour, each with probability `rate`."""
    out = {}
    for name, array in named.items():
        raw = np.array(array).reshape(-1).view(np.uint8)
        if name.endswith("weight_packed"):
            for shift in (0, 4):
                spots = np.unique(rng.integers(0, len(raw), rng.binomial(len(raw), rate)))
                raw[spots] ^= np.uint8(1 << shift)
        elif name.endswith("scale"):
            spots = np.unique(rng.integers(0, len(raw) // 2, rng.binomial(len(raw) // 2, rate)))
            raw[2 * spots] ^= np.uint8(1)
        out[name] = raw.view(array.dtype).reshape(array.shape)
    return out


def stage(named: dict[str, np.ndarray], step: int) -> sender.StagedVersion:
    """The tensors as version `step`."""
    return sender.stage(
        named.items(),
        version=messages.Version(run_id="delta", incarnation=1, step=step),
        model=messages.model_fingerprint(CONFIG),
        scheme=messages.scheme_hash(CONFIG["quantization_config"]),
    )


def bridge_of(named: dict[str, np.ndarray], folder: str) -> tuple[subprocess.Popen, sender.Client]:
    """A process with a toy engine, and a connection with its lease."""
    expected = [
        messages.Expected(name=name, dtype=messages.dtype_name(array.dtype), shape=list(array.shape))
        for name, array in named.items()
    ]
    sender.write_folder(os.path.join(folder, "model"), CONFIG, expected)
    key_file = os.path.join(folder, "key")
    key = messages.create_key(key_file)
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"tcp://127.0.0.1:{holder.getsockname()[1]}"
    command = [sys.executable, "-m", "qarl_bridge", "--socket", address, "--model", os.path.join(folder, "model")]
    process = subprocess.Popen([*command, "--key-file", key_file, "--options", '{"engine": "fake"}'])
    deadline = time.monotonic() + 120
    while True:
        try:
            client = sender.Client(address, key, timeout_s=600)
            client.acquire("delta", 1)
            return process, client
        except BridgeError:
            if time.monotonic() > deadline or process.poll() is not None:
                raise
            time.sleep(0.1)


def zlib_of(old: sender.StagedVersion, new: sender.StagedVersion) -> dict[str, float]:
    """Bytes per byte, and GB/s, of the usual way."""
    size = min(ZLIB_BYTES, new.manifest.total_bytes)
    a, b = (np.frombuffer(one.chunk(0, size), np.uint8) for one in (old, new))
    began = time.perf_counter()
    packed = zlib.compress(a ^ b, 1)
    return {"zlib_share": len(packed) / size, "zlib_gb_per_s": size / 1e9 / (time.perf_counter() - began)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=tuple(SIZES), default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rates", type=float, nargs="+", default=[0, 1e-7, 1e-5, 1e-3, 1e-2, 1e-1])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    rng = np.random.default_rng(0)
    named = layer_tensors(args.shape, args.layers, rng)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        process, client = bridge_of(named, folder)
        try:
            before = stage(named, 0)
            total = before.manifest.total_bytes
            whole = client.publish(before, readback="off")
            whole_s = whole["transfer_s"]
            print(f"{args.layers} layers of {args.shape}, {total / 1e6:.1f} MB; whole: {whole_s:.3f} s")
            columns = ("rate", "MB sent", "1 / share", "find", "send", "apply", "verify", "whole / (find + send)")
            print(f"| {' | '.join(columns)} | zlib: 1 / share, GB/s |\n|{'---|' * (len(columns) + 1)}")
            for step, rate in enumerate(args.rates, start=1):
                named = changed(named, rate, rng)
                after = stage(named, step)
                after.base = before
                began = time.perf_counter()
                after.changes_to(before.manifest.digest)
                find_s = time.perf_counter() - began
                report = client.publish(after, readback="full")
                sent, send_s = report["sent_bytes"], report["transfer_s"]
                row = {
                    "rate": rate, "sent_bytes": sent, "share": sent / total, "find_s": find_s, "send_s": send_s,
                    "validate_s": report["validate_s"], "put_together_s": report["open_s"],
                } | zlib_of(before, after)  # fmt: skip
                results.append(row)
                print(
                    f"| {rate:g} | {sent / 1e6:.3f} | {total / max(sent, 1):.0f} | {find_s:.3f} | {send_s:.3f} | "
                    f"{row['put_together_s']:.3f} | {row['validate_s']:.3f} | "
                    f"{whole_s / (find_s + send_s):.1f} | {1 / row['zlib_share']:.0f}, {row['zlib_gb_per_s']:.2f} |",
                    flush=True,
                )
                before.close()
                before = after
            client.shutdown()
            client.close()
        finally:
            process.kill()
            process.wait()
    if args.out:
        record = {
            "command": " ".join(["python -m benchmarks.publish_delta", *(argv or sys.argv[1:])]),
            "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
            "bytes": total, "whole_s": whole_s, "whole_validate_s": whole["validate_s"], "results": results,
        }  # fmt: skip
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
