# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks a machine for any run, whatever its config: interpreter, packages, memory, devices, and whether its
integer products and its weight grid are exact. `python -m qarl_jax.doctor` prints it."""

from __future__ import annotations

import collections
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Iterator
from typing import Literal

import jax
import numpy as np
from packaging.requirements import Requirement

from qarl_jax import quant
from qarl_jax.quant.contractions import Dense
from qarl_jax.quant.schemes import w8a8
from qarl_jax.rewards import jail
from qarl_jax.types import UserError

Status = Literal["ok", "warn", "fail"]

GIB = 2.0**30
DISTRIBUTION = "qarl-jax"
SHOWN = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "aqtp", "qarl-bridge")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the report. Example: Check(name="disk", status="warn", found="0.4 GiB free", todo="free some space").

    Attributes:
      name: what was looked at.
      status: ok, warn (a run may go on, perhaps not as meant) or fail (it will not start, or compute wrong numbers).
      found: what is there.
      todo: what to do about it; empty where the status is ok.
    """

    name: str
    status: Status
    found: str
    todo: str = ""

    def in_words(self) -> str:
        """Returns the check as text, with `todo` on a line of its own."""
        text = f"{self.status:<5} {self.name:<18} {self.found}"
        return f"{text}\n{'':<24} -> {self.todo}" if self.todo else text


def amount(nbytes: float) -> str:
    """Formats a number of bytes. Example: amount(3 * 2**20) == "3 MiB"."""
    return f"{nbytes / GIB:.1f} GiB" if nbytes >= 0.1 * GIB else f"{nbytes / 2**20:.0f} MiB"


def check(name: str, good: bool, found: str, todo: str, otherwise: Status = "fail") -> Check:
    """Makes a `Check`: ok if `good`, otherwise with status `otherwise` ("warn" or "fail") and what to do."""
    if good:
        return Check(name=name, status="ok", found=found)
    return Check(name=name, status=otherwise, found=found, todo=todo)


def failed(name: str, error: UserError, todo: str = "mend it, and start again") -> Check:
    """Makes a check that failed by an error; `todo` is for one without a remedy of its own."""
    return Check(name=name, status="fail", found=error.fault, todo=error.remedy or todo)


def python_version() -> Check:
    """Checks the version of the trainer's Python."""
    version = sys.version_info[:3]
    found = ".".join(map(str, version)) + f" at {sys.executable}"
    return check("python", (3, 11) <= version < (3, 14), found, "use Python 3.11, 3.12 or 3.13")


def packages() -> Iterator[Check]:
    """Checks the versions of installed packages against the requirements of qarl-jax."""
    try:
        lines = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Check(
            name="packages",
            status="warn",
            found=f"{DISTRIBUTION} runs from its source folder, not installed",
            todo="pip install -e ./bridge -e . so that the versions of its dependencies are checked",
        )
        lines = []
    requirements = {r.name: r for r in map(Requirement, lines) if r.marker is None or r.marker.evaluate({"extra": ""})}
    found: list[str] = []
    for name in dict.fromkeys((*SHOWN, *requirements)):
        wanted = requirements.get(name)
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name=name, status="fail", found="not installed", todo=f"pip install '{wanted or name}'")
            continue
        if wanted is not None and not wanted.specifier.contains(version, prereleases=True):
            yield Check(name=name, status="fail", found=version, todo=f"pip install '{wanted}'")
        elif name in SHOWN:
            found.append(f"{name} {version}")
    if found:
        yield Check(name="packages", status="ok", found=", ".join(found))


def _read(path: str) -> str:
    try:
        return pathlib.Path(path).read_text()
    except OSError:
        return ""


def cpu() -> Check:
    """Checks for the instruction sets that vLLM's CPU kernels need; reports the cores of this process."""
    flags = set(_read("/proc/cpuinfo").split())
    known = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx_vnni", "amx_int8", "amx_bf16")
    has = [flag for flag in known if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    found = f"{platform.machine()}, {cores} core(s), {' '.join(has) or 'none of ' + ' '.join(known)}"
    return check(
        "cpu",
        platform.machine() != "x86_64" or "avx2" in has,
        found,
        "vLLM's CPU build needs AVX2; use rollout.engine.name=jax here",
        "warn",
    )


def host_memory_bytes() -> int:
    """Returns the bytes that this process may still take: the system's, within the container's limit."""
    available = [
        int(line.split()[1]) * 1024 for line in _read("/proc/meminfo").splitlines() if line.startswith("MemAvailable:")
    ]
    limit, used = _read("/sys/fs/cgroup/memory.max").strip(), _read("/sys/fs/cgroup/memory.current").strip()
    if limit.isdigit() and used.isdigit():
        available.append(int(limit) - int(used))
    return min(available, default=0)


def host_memory() -> Check:
    """Checks that 2 GiB of main memory are free, else warns; passes where the free memory is unknown."""
    free = host_memory_bytes()
    return check(
        "memory",
        free == 0 or free >= 2 * GIB,
        f"{amount(free)} available",
        "free memory: a run takes 2 GiB",
        "warn",
    )


def shared_memory() -> Check:
    """Checks the space of /dev/shm, which vLLM and torch use; the bridge passes weights in anonymous memory files."""
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return Check(
            name="shared memory", status="warn", found="no /dev/shm", todo="needed by vLLM: mount a tmpfs there"
        )
    return check(
        "shared memory",
        usage.free >= 64 * 2**20,
        f"/dev/shm {amount(usage.total)}, {amount(usage.free)} free",
        "vLLM wants some: docker run --shm-size=1g",
        "warn",
    )


def devices() -> Check:
    """Checks the devices that JAX computes on."""
    try:
        found = jax.devices()
    except RuntimeError as error:
        return Check(
            name="devices",
            status="fail",
            found=str(error).splitlines()[0],
            todo="install the extra of this machine (cuda12, cuda13, tpu), or set JAX_PLATFORMS=cpu",
        )
    kinds = collections.Counter(device.device_kind for device in found)
    text = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) + f" ({jax.default_backend()})"
    limit = device_memory_bytes()
    if limit:
        text += f", {amount(limit)} each"
    gpu_unused = jax.default_backend() == "cpu" and os.path.exists("/proc/driver/nvidia/version")
    return check(
        "devices",
        not gpu_unused,
        text + (", although an NVIDIA driver is loaded" if gpu_unused else ""),
        "pip install 'qarl-jax[cuda13]' (or cuda12), and leave JAX_PLATFORMS unset",
        "warn",
    )


def device_memory_bytes() -> int:
    """Returns the bytes of one accelerator that JAX may use; 0 on a CPU."""
    if jax.default_backend() == "cpu":
        return 0
    return int((jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0))


def jail_of_programs() -> Check:
    """Checks the sandbox for programs that a policy writes and that a reward or an environment runs."""
    whole, found = jail.walls()
    return check("jail", whole, found, "install bubblewrap, where namespaces are allowed (SECURITY.md)", "warn")


# ---- arithmetic ------------------------------------------------------------------------------------------------------


def integer_products() -> Check:
    """Checks AQT's int8 product, and that of packed int4 codes, against numpy's 64-bit integers."""
    rng = np.random.default_rng(0)
    x = rng.integers(-128, 128, (5, 1024)).astype(np.int8)
    w8 = rng.integers(-128, 128, (7, 1024)).astype(np.int8)
    w4 = rng.integers(-8, 8, (7, 1024)).astype(np.int8)
    product = jax.jit(Dense().integer)
    through_words = quant.unpack_int4(quant.pack_int4(w4))
    wrong = [
        name
        for name, codes, weight in (("int8", w8, w8), ("int4", through_words, w4))
        if not np.array_equal(np.asarray(product(x, codes)), x.astype(np.int64) @ weight.T.astype(np.int64))
    ]
    return check(
        "integer products",
        not wrong,
        "int8 and int4 products are exact" if not wrong else f"{' and '.join(wrong)} products are wrong on this device",
        "do not train here with a quantized scheme; report device, driver and jaxlib version",
    )


def weight_grid() -> Check:
    """Checks scales and codes of int8 weights, under jit on this device, against IEEE division in numpy."""
    import ml_dtypes

    w = np.random.default_rng(1).normal(size=(64, 512)).astype(np.float32)
    qt = quant.quantize(w, w8a8.Config())
    rounded = w.astype(ml_dtypes.bfloat16).astype(np.float32)
    scale = np.abs(rounded).max(-1, keepdims=True) / np.float32(127.5)
    codes = np.clip(np.rint(rounded / scale), -128, 127).astype(np.int8)
    same = np.array_equal(np.asarray(qt.scales), scale) and np.array_equal(np.asarray(qt.codes), codes)
    return check(
        "weight grid",
        same,
        "int8 scales and codes equal the reference, bit for bit" if same else "int8 scales or codes differ by rounding",
        "learner and sampler still share one grid, but exports would differ from compressed-tensors'; report it",
    )


def checks() -> Iterator[Check]:
    """Yields all checks in the order of a report. If "devices" fails it is the last, because JAX does not start."""
    yield python_version()
    yield from packages()
    yield cpu()
    yield host_memory()
    yield shared_memory()
    yield jail_of_programs()
    found = devices()
    yield found
    if found.status != "fail":
        yield integer_products()
        yield weight_grid()
