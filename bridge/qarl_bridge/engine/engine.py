# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs one vLLM engine in this process: generates, loads weights in place, reads them back, records activations.

Settings of vLLM that decide the arithmetic (reported in `facts`):

  * bf16 activations, operations as in eager mode (in CUDA graphs or not): one rounding for each operation, as the
    learner computes it, and no inductor fusions;
  * on a CPU, every operation whose rounding depends on vLLM's build is replaced by the bridge's (cpu/linear.py,
    cpu/layers.py, cpu/experts.py), so all builds compute equal bits; `VLLM_CPU_INT4_W4A8` decides whether int4 layers
    quantize their activations, which otherwise depends on the build;
  * log-probs after temperature and top-p (`processed_logprobs`), for the sampled token only;
  * no settings from generation_config.json.

vLLM's `reload_weights` replaces weights, given in checkpoint format, whole fused modules in layer order.

A functional read-back (readback/linear.py) then checks the weights that the live layers use.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from qarl_bridge.engine import shard_memory, versions
from qarl_bridge.engine.cpu import build
from qarl_bridge.engine.machine import Cpu, Cuda, Machine
from qarl_bridge.engine.routing_recorder import Recorder
from qarl_bridge.engine.shard import Shard
from qarl_bridge.protocol import adapters, expert_stacks, formats, messages, one_base
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server import staged_gpu
from qarl_bridge.server.engine_api import Finished, Parts, Sweeps, lasts
from qarl_bridge.server.staged import Copy

if TYPE_CHECKING:  # it imports torch, which reads its settings when it is imported
    from qarl_bridge.engine.adapters import Adapters
    from qarl_bridge.engine.one_base import Base


def _int4_activations(config: Mapping[str, Any]) -> str:
    """Reads from a config.json how int4 layers take activations: "bf16", or "int8" for w4a8; BridgeError if mixed."""
    taken = [g.get("input_activations") for g in formats.groups_of(config) if formats.is_int4(g)]
    found = {"bf16" if a is None else "int8" for a in taken} or {"bf16"}
    if len(found) > 1:
        raise BridgeError("w4a16 and w4a8 layers in one model: vLLM's CPU engine runs all int4 layers one way", "setup")
    return found.pop()


def _prepare_environment(w4a8: bool) -> None:
    """Sets environment variables that vLLM reads at import. Call it before vllm is imported."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the weights iterator holds live tensors: same process
    os.environ["VLLM_CPU_INT4_W4A8"] = "1" if w4a8 else "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("VLLM_DISABLE_LOG_LOGO", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # OpenMP threads that wait for each other by spinning lose a scheduler slice (7-15 ms, at every op) as soon as
    # anybody else wants a core: sleeping after a short spin made decoding 3-13x faster on a busy 2-core host.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    os.environ.setdefault("KMP_BLOCKTIME", "1")
    # Staged tensors are read only, and nothing writes to them.
    warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


def _torch_view(torch: Any, array: np.ndarray) -> Any:
    """Views a numpy array as a torch tensor without a copy; bfloat16 and float8 are reinterpreted by their bits."""
    name = messages.dtype_name(array.dtype)
    if name in ("bfloat16", "float8_e4m3fn"):
        bits = array.view(np.uint16 if name == "bfloat16" else np.uint8)
        return torch.from_numpy(bits).view(getattr(torch, name))
    return torch.from_numpy(array)


def _started(arguments: Mapping[str, Any], path: str) -> Any:
    """Starts vLLM's engine in this process; BridgeError("setup") if it fails."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise BridgeError(f"vLLM could not start on {path}: {type(error).__name__}: {error}", "setup") from error


def _join(shard: Shard, *, on_gpu: bool, batch_invariant: bool) -> None:
    """Prepares communication between the shards of a tensor-parallel engine. Call it before vLLM starts."""
    if not on_gpu:
        shard_memory.keep_apart(shard.owner)
    if batch_invariant:
        from qarl_bridge.engine import all_reduce

        all_reduce.pin()


class VllmEngine:
    """A vLLM engine, or one shard of it; implements `engine_api.Engine`. It computes on the calling thread."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        expected: Mapping[str, messages.Expected],
        *,
        has_weights: bool,
        options: messages.EngineOptions,
        shard: Shard = Shard(),
        base: Sequence[one_base.Place] = (),
    ):
        """Starts the engine, on this process's GPU or on the CPU.

        Args:
          path: the model folder. config: its config.json.
          expected: dtype and shape of every tensor of a version, by name.
          has_weights: True if the folder has weights, which are loaded.
          options: the engine's options. shard: the part of the model that this process computes.
          base: buffers in the trainer's memory with weights that `expected` does not list.

        Raises:
          BridgeError("setup"): vLLM cannot be imported, or cannot serve this model with these options.
        """
        self.expected, self.has_weights, self._shard = expected, has_weights, shard
        activations = _int4_activations(config)
        _prepare_environment(activations == "int8")
        build.prepare()
        import torch

        self._torch = torch
        shard.check(config)
        if torch.cuda.is_available():
            shard.take_gpu(torch)
        self._machine: Machine = (Cuda if torch.cuda.is_available() else Cpu)(torch, options)
        on_gpu = self._machine.profile == "cuda"
        try:
            import vllm
        except ImportError as error:
            raise BridgeError(f"vLLM cannot be imported by {sys.executable}: {error}", "setup") from None
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        shapes = {name: one.shape for name, one in expected.items() if adapters.is_adapter(name)}
        if shapes and options.arithmetic == "vllm":
            raise BridgeError("adapters are not served with rollout.engine.arithmetic=vllm: leave it out", "setup")
        arguments = versions.engine_arguments(
            options, path=path, has_weights=has_weights, on_gpu=on_gpu, adapters=shapes
        )
        departures = self._machine.replace(config, options)
        self._one_base = self._opened(base, on_gpu=on_gpu) if base else None
        invariant = options.arithmetic == "batch_invariant"
        if not shard.is_whole:
            _join(shard, on_gpu=on_gpu, batch_invariant=invariant)
        self._engine = _started(arguments | shard.arguments(batch_invariant=invariant), path)
        self._worker = versions.Worker(self._engine)
        self._model = self._worker.model
        self._modules = dict(self._model.named_modules())
        if self._one_base is not None:
            self._one_base.check(self._modules)
        self._routing: Recorder | None = self._worker.recorder
        self._adapters: Adapters | None = self._worker.adapters
        self.met = self._worker.met
        self._staging = threading.Lock()  # of adapters.py's staged tensor
        self._look_inside(activations)
        self._machine.after_load(self._modules)
        self.facts = self._facts(vllm.__version__, config, options, departures)
        self._receiver = staged_gpu.receiver() if on_gpu else None

    def _facts(
        self,
        version: str,
        config: Mapping[str, Any],
        options: messages.EngineOptions,
        departures: Sequence[str],
    ) -> messages.Facts:
        """Describes the started engine to the trainer; `departures` are known before its modules are."""
        machine, shard = self._machine, self._shard
        on_gpu = machine.profile == "cuda"
        notes = [*versions.untested_note(version), machine.note]
        notes += [] if shard.is_whole else [f"{shard.size} shards, each with its own scales of activations"]
        notes += [f"{len(self._adapters)} layers with adapters"] if self._adapters else []
        notes += [f"{len(self._one_base.layers)} layers read the trainer's memory"] if self._one_base else []
        return messages.Facts(
            engine="vllm",
            engine_version=version,
            profile=machine.profile,
            isa=machine.isa,
            kernels=self._kernels(),
            model=messages.model_fingerprint(config),
            scheme=messages.scheme_hash(config.get("quantization_config")),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(self._engine.model_config.max_model_len),
            threads=machine.threads,
            pid=os.getpid(),
            notes=[note for note in notes if note],
            execution=versions.execution_of(options, on_gpu),
            departures=[*departures, *machine.left_to_vllm(self._modules)],
            records_routing=options.record_routing,
            device=staged_gpu.uuid_of_current() if on_gpu else b"",
            tensor_parallel_size=shard.size,
        )

    def _opened(self, places: Sequence[one_base.Place], *, on_gpu: bool) -> Base:
        """Maps the base in the trainer's memory, so that its layers allocate no weights. Call it before vLLM starts."""
        from qarl_bridge.engine import nvfp4_layers
        from qarl_bridge.engine.one_base import Base

        base = Base.open(places, on_gpu=on_gpu)
        nvfp4_layers.GIVEN.update(base.layers)
        return base

    def _look_inside(self, activations: str) -> None:
        """Makes the read-back, and, for an engine of one shard, the loader of whole modules."""
        from qarl_bridge.engine.fast_load import WholeModules
        from qarl_bridge.engine.readback.linear import ReadBack

        self._readback = ReadBack(
            self._modules,
            self._tied_heads(),
            device=self.device,
            activations=activations,
            context=self._worker.config,
        )
        self._whole = WholeModules(self._model, self._engine.model_config) if self._shard.is_whole else None
        self._whole_is_proved = False

    def _kernels(self) -> dict[str, str]:
        """Maps the name of each linear layer to the name of the class that computes it."""
        found = {}
        for name, module in self._modules.items():
            if not hasattr(module, "quant_method"):
                continue
            scheme = getattr(module, "scheme", None)
            kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
            computing = kernel or scheme or module.quant_method
            label = type(computing).__name__
            found[name] = type(module.cpu_linear).__name__ if hasattr(module, "cpu_linear") else label
        return found

    # Generating ------------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, draw: messages.Draw, sampling: messages.Sampling) -> None:
        """Queues a request for one completion, with the seed of `draw`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            seed=draw.seed if sampling.temperature > 0 else None,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,  # only the stop tokens the trainer named end a response
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._engine.add_request(request_id, {"prompt_token_ids": list(draw.prompt)}, params)

    def abort(self, request_ids: list[str]) -> None:
        """Cancels requests."""
        self._engine.abort_request(request_ids)
        if self._routing is not None:
            self._routing.forget(request_ids)

    def running(self) -> int:
        """Counts the unfinished requests."""
        return self._engine.get_num_unfinished_requests()

    def step(self) -> list[Finished]:
        """Runs one engine step (continuous batching); returns the requests that ended in it."""
        finished = []
        for output in self._engine.step():
            if not output.finished:
                continue
            completion = output.outputs[0]
            tokens = np.asarray(completion.token_ids, np.int32)
            logprobs = np.asarray(completion.logprobs.logprobs, np.float32)
            drawn = np.asarray(completion.logprobs.token_ids, np.int32)
            if not np.array_equal(tokens, drawn) or not np.isfinite(logprobs).all():
                raise RuntimeError(f"request {output.request_id}: log-probs do not belong to the drawn tokens")
            reason = completion.finish_reason if completion.finish_reason in ("stop", "length") else "abort"
            routed = None
            if self._routing is not None:
                fed = len(output.prompt_token_ids) + len(tokens) - 1  # the last token is drawn, not fed
                routed = self._routing.take(output.request_id, fed)
            finished.append(Finished(output.request_id, tokens, logprobs, reason, routed))
        return finished

    # Loading ---------------------------------------------------------------------------------------------------------

    def prepare(self, copy: Copy) -> None:
        """Stages a partial version's adapters on the engine's device while the engine decodes (adapters.py)."""
        if self._adapters is not None:
            with self._staging:
                self._adapters.prepare(copy.manifest, self._on_torch(copy.parts()))

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """A context in which no version is staged, and at whose end the GPU has done what was asked of it."""
        with self._staging:
            try:
                yield
            finally:
                if self._machine.profile == "cuda":
                    self._torch.cuda.current_stream().synchronize()

    def _prepared(self, parts: Parts, partial: bool) -> Mapping[str, Any] | None:
        """Returns the tensors that are no adapters of a prepared version; None if `parts` was not prepared."""
        held, digest = self._adapters, getattr(parts, "digest", b"")
        return held.prepared(digest) if partial and held is not None else None

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Replaces weights in place through vLLM's reload interface, then clears prefix and KV caches."""
        with self._alone():
            rest = self._prepared(parts, partial)
            if rest is None:
                self._load(self._base_of(self._on_torch(parts)), partial)
            else:
                assert self._adapters is not None
                self._adapters.switch()
                self._load_some([rest])

    def _load(self, parts: Parts, partial: bool) -> None:
        if partial:
            self._load_some(parts)
            return
        if self._whole is not None:
            if self._whole_is_proved:
                self._whole_is_proved = False  # should it fail half-way, vLLM's loader restores
                with self._worker.config():
                    self._whole.load(parts)
                self._whole_is_proved = True
            else:
                self._prove_whole(parts)
        else:
            self._reload(parts)
        if self._one_base is not None:
            self._one_base.load(self._modules)
        self._machine.after_load(self._modules)
        self._worker.forget()

    def _load_some(self, parts: Parts) -> None:
        """Loads a partial version: some modules over the version that is loaded."""
        loaded = False
        for part in parts:
            if part and self._whole is not None:
                with self._worker.config():
                    self._whole.load([part])
            elif part:
                self._reload([part])
            loaded = loaded or bool(part)
        if loaded:
            self._machine.after_load(self._modules)
        self._worker.forget()

    def _base_of(self, parts: Parts) -> Parts:
        """Loads the adapters among `parts` during iteration, and yields the other tensors."""
        held = self._adapters
        return parts if held is None else Sweeps(lambda: held.load(parts), lasts(parts))

    def _reload(self, parts: Parts) -> None:
        """Loads weights by vLLM's loader, which keeps tensors until a layer is complete."""
        keep = lasts(parts)
        pairs = ((name, x if keep else x.to("cpu", copy=True)) for part in parts for name, x in part.items())
        self._worker.reload(expert_stacks.apart(pairs))

    def _prove_whole(self, parts: Parts) -> None:
        """Loads the first version, and decides whether loads may go module by module (fast_load.py)."""
        assert self._whole is not None
        base = {name: one for name, one in self.expected.items() if not adapters.is_adapter(name)}
        reason = self._compare_whole(parts, self._whole.sample(base))
        if reason:
            self._whole = None
            self._reload(parts)
        self._whole_is_proved = not reason
        note = f"vLLM's own loader loads every version: {reason}" if reason else "loading whole modules"
        self.facts = msgspec.structs.replace(self.facts, notes=[*self.facts.notes, note])

    def _compare_whole(self, parts: Parts, sample: Mapping[str, list[str]]) -> str:
        from qarl_bridge.engine import fast_load

        assert self._whole is not None
        wanted = {name for names in sample.values() for name in names}
        copy = not lasts(parts)
        named = {n: x.to("cpu", copy=copy) for part in parts for n, x in part.items() if n in wanted}
        self._worker.reload(expert_stacks.apart(named.items()))
        with self._worker.config():
            return fast_load.prove(self._whole, parts, sample)

    def open_device(self, manifest: messages.Manifest, memory: messages.DeviceMemory) -> Copy:
        """Maps a version in the trainer's buffer on this engine's GPU; BridgeError("unshared") if it cannot."""
        if not self.facts.device:
            raise BridgeError("this engine runs on a CPU", "unshared")
        if memory.device != self.facts.device:
            raise BridgeError("the trainer's arrays and this engine lie on different GPUs", "unshared")

        return staged_gpu.open_version(manifest, memory)

    def forget_trainer(self) -> None:
        """Unmaps the trainer's buffers on this engine's GPU that no version uses."""
        if self.facts.device:
            staged_gpu.forget_trainer()

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """Receives a version over NCCL into this engine's GPU memory; BridgeError("unshared") on a CPU."""
        if self._receiver is None:
            raise BridgeError("this engine runs on a CPU", "unshared")

        return staged_gpu.receive_version(self._receiver, manifest, memory, check)

    def restore_initial(self) -> bool:
        """Reloads the model folder's weights; returns False if the folder has none."""
        if not self.has_weights:
            return False
        self._whole_is_proved = False
        if self._adapters is not None:
            self._adapters.clear()
        self._worker.reload()
        self._machine.after_load(self._modules)
        self._worker.forget()
        return True

    def _on_torch(self, parts: Parts) -> Parts:
        def sweep() -> Iterator[Mapping[str, Any]]:
            return ({name: self._tensor(array) for name, array in part.items()} for part in parts)

        return Sweeps(sweep, lasts(parts))

    def _tensor(self, array: Any) -> Any:
        return _torch_view(self._torch, array) if isinstance(array, np.ndarray) else array

    @property
    def device(self) -> Any:
        """The torch.device on which the engine computes."""
        return self._torch.device(self._machine.profile)

    def tensor_on_device(self, array: Any) -> Any:
        """Moves a version's tensor (numpy or torch) to the engine's device, as a torch tensor."""
        return self._tensor(array).to(self.device)

    def outputs_of(self, module: str) -> list[int]:
        """Lists how many outputs this shard has of each linear layer that a module fuses; empty if not linear."""
        return list(getattr(self._modules.get(module), "output_partition_sizes", ()))

    def _tied_heads(self) -> dict[str, str]:
        """Maps the name of each head that shares an embedding's weight to the embedding's name."""
        kinds = {name: type(module).__name__ for name, module in self._modules.items()}
        return {
            head: embedding
            for head in kinds
            for embedding in kinds
            if kinds[head] == "ParallelLMHead"
            and kinds[embedding] == "VocabParallelEmbedding"
            and self._modules[head].weight is self._modules[embedding].weight
        }

    # Looking inside --------------------------------------------------------------------------------------------------

    def read_back(self, parts: Parts, mode: str, seed: int, *, partial: bool = False) -> tuple[int, int]:
        """Compares live layers with staged tensors (readback/linear.py); returns (layers, one-hot rows) compared.

        Adapters are matrices as published. All their values are compared, whatever the mode (adapters.py).
        """
        held, whole = self._adapters, parts
        if not self._shard.is_whole:
            parts = Sweeps(lambda: (self._shard.part_of(part) for part in whole), lasts(whole))
        with self._alone():
            rest = self._prepared(parts, partial)
            if rest is not None:
                parts = [rest] if rest else []
            else:
                parts = self._with_base(self._on_torch(parts), partial)
                parts = parts if held is None else (held.stage(part) for part in parts)
            layers, rows = self._readback.compare(parts, mode, seed, partial=partial)
            own, of_own = held.compare() if held is not None else (0, 0)
        return layers + own, rows + of_own

    def _with_base(self, parts: Parts, partial: bool) -> Parts:
        """Appends the base's tensors in the trainer's memory to the tensors of a complete version."""
        base = self._one_base
        if base is None or partial:
            return parts
        return Sweeps(lambda: itertools.chain(parts, base.parts()), lasts(parts))

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """Prefills `prompt` and records each module's inputs (tensor arguments in order) and outputs.

        If the engine records routed experts, a last record named messages.ROUTING holds them, int32 [T, layers, k].

        Raises:
          BridgeError("limits"): the model has no such module, a prefill does not call it, or the engine is compiled
            and calls no single modules.
        """
        if self.facts.execution == "compiled":
            raise BridgeError("modules of a compiled engine cannot be probed: leave arithmetic=vllm out", "limits")
        if unknown := [name for name in modules if name not in self._modules]:
            raise BridgeError(f"the engine has no module {unknown[0]!r}", "limits")
        self._worker.forget()  # a cached prefix would not be computed again
        inputs: dict[str, list[messages.Array]] = {}
        outputs: dict[str, list[messages.Array]] = {}
        hooks = []
        for name in modules:  # the first call of each is the prefill; a decoding step may follow

            def before(module: Any, args: tuple, kwargs: dict, name: str = name) -> None:
                if name not in inputs:  # copied before the call: vLLM adds residuals in place
                    inputs[name] = _copies((*args, *kwargs.values()))

            def after(module: Any, args: tuple, output: Any, name: str = name) -> None:
                outputs.setdefault(name, _copies(output))

            hooks.append(self._modules[name].register_forward_pre_hook(before, with_kwargs=True))
            hooks.append(self._modules[name].register_forward_hook(after))
        routed = None
        try:
            self.submit("probe", messages.Draw(prompt=prompt, seed=0), messages.Sampling(max_tokens=1, temperature=0.0))
            while self.running():
                routed = next((done.routed for done in self.step()), None)
        finally:
            for hook in hooks:
                hook.remove()
        if missing := [name for name in modules if name not in outputs]:
            raise BridgeError(f"module {missing[0]!r} was not called in a prefill", "limits")
        found = [messages.Recorded(module=name, inputs=inputs[name], outputs=outputs[name]) for name in modules]
        if routed is not None:
            found.append(
                messages.Recorded(
                    module=messages.ROUTING, inputs=[], outputs=[messages.Array.of(routed.astype(np.int32))]
                )
            )
        return found

    def close(self) -> None:
        """Shuts the engine down and frees its receive buffers."""
        if self._receiver is not None:
            self._receiver.close()
        self._engine.engine_core.shutdown()


def _copies(value: Any) -> list[messages.Array]:
    """Copies every tensor in a tuple of arguments or results to a message."""
    import torch

    out = []
    for part in value if isinstance(value, (tuple, list)) else (value,):
        if isinstance(part, torch.Tensor):
            tensor = part.detach().cpu().contiguous()
            if tensor.dtype == torch.bfloat16:
                array = tensor.view(torch.uint16).numpy().view(messages.DTYPES["bfloat16"])
            else:
                array = tensor.numpy()
            out.append(messages.Array.of(array))
    return out
