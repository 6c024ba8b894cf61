# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Chooses the build (instruction set) of vLLM's CPU wheel: the CPU's best, or one that an environment variable names.

The x86 wheel holds three extensions and picks one by torch's report of the CPU: `_C` (AVX-512 with bf16 instructions;
AMX is a switch inside it), `_C_AVX512` and `_C_AVX2`. Arm has one. `QARL_BRIDGE_CPU_BUILD` names a lesser build, to
test a lesser machine: vLLM, torch, oneDNN and MKL then avoid instructions that it lacks. All builds give equal bits.
"""

from __future__ import annotations

import os
import platform
from typing import Any

from qarl_bridge.protocol.errors import BridgeError

VARIABLE = "QARL_BRIDGE_CPU_BUILD"
# Least first. The values: torch's own vector code, oneDNN's, MKL's.
_LIMITS = {
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE_VNNI", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
    "amx": ("avx512", "AVX512_CORE_AMX", "AVX512"),
}
BUILDS = tuple(_LIMITS)


def asked() -> str:
    """Returns the build that QARL_BRIDGE_CPU_BUILD names; "" if it is not set.

    Raises:
      BridgeError("setup"): the variable names no build.
    """
    name = os.environ.get(VARIABLE, "")
    if name and name not in BUILDS:
        raise BridgeError(f"{VARIABLE}={name} is no build of vLLM's CPU wheel: use one of {', '.join(BUILDS)}", "setup")
    return name


def prepare() -> None:
    """Sets the variables by which torch, oneDNN and MKL limit instructions. Call it before torch is imported."""
    if name := asked():
        vectors, onednn, mkl = _LIMITS[name]
        os.environ |= {"ATEN_CPU_CAPABILITY": vectors, "ONEDNN_MAX_CPU_ISA": onednn, "MKL_ENABLE_INSTRUCTIONS": mkl}


def own(torch: Any) -> str:
    """Returns the build that vLLM picks for this CPU: "arm", "amx", "avx512_bf16", "avx512" or "avx2"."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "arm"
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512_bf16"
    return "avx512" if torch.cpu._is_avx512_supported() else "avx2"


def runnable(torch: Any) -> tuple[str, ...]:
    """Lists vLLM's CPU builds that this CPU can run, from the fewest instructions needed to the most."""
    mine = own(torch)
    return BUILDS[: BUILDS.index(mine) + 1] if mine in BUILDS else (mine,)


def choose(torch: Any) -> str:
    """Makes vLLM use the build of QARL_BRIDGE_CPU_BUILD, or the CPU's; returns its name. Call it before vLLM's import.

    Raises:
      BridgeError("setup"): this CPU cannot run the named build.
    """
    name = asked()
    if not name:
        return own(torch)
    if name not in (possible := runnable(torch)):
        raise BridgeError(f"{VARIABLE}={name}: this CPU can run {', '.join(possible)} only", "setup")
    for probe, least in (
        ("_is_avx512_supported", "avx512"),
        ("_is_avx512_bf16_supported", "avx512_bf16"),
        ("_is_amx_tile_supported", "amx"),
    ):
        has = BUILDS.index(name) >= BUILDS.index(least)
        setattr(torch.cpu, probe, lambda has=has: has)
    return name
