# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine, in this process: generate, load in place, read back, probe. versions.py hides its versions.

What is set in vLLM, because each choice changes what is computed (and each is asserted in `facts`):

  * bf16 activations, ops as in eager mode (in CUDA graphs or not): one rounding per op, as the learner mirrors it, and
    no inductor fusions;
  * on a CPU, every operation whose rounding depends on vLLM's build is the bridge's own (cpu/linear.py,
    cpu/layers.py, cpu/experts.py), so that all builds are one engine; `VLLM_CPU_INT4_W4A8` says whether int4
    layers quantize their activations, which vLLM decides by the build otherwise;
  * log-probs of the distribution drawn from (`processed_logprobs`), for the drawn token only;
  * nothing is taken from generation_config.json.

Weights are replaced through vLLM's own `reload_weights`, in checkpoint format, whole fused modules in layer order.

What is held afterwards is proved by the functional read-back (readback/linear.py).
"""

from __future__ import annotations

import itertools
import logging
import os
import sys
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
    """Reads the activations of the int4 layers of this config.json: "bf16" or "int8" (w4a8); all the same.

    vLLM's CPU engine runs all int4 layers one way.
    """
    int4 = [g for g in formats.groups_of(config) if g["weights"]["num_bits"] == 4 and g["weights"]["type"] == "int"]
    taken = [g.get("input_activations") for g in int4]
    found = {"bf16" if a is None else "int8" for a in taken} or {"bf16"}
    if len(found) > 1:
        raise BridgeError("w4a16 and w4a8 layers in one model: vLLM's CPU engine runs all int4 layers one way", "setup")
    return found.pop()


def _prepare_environment(w4a8: bool) -> None:
    """Before vllm is imported: it reads these once."""
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
    """A torch tensor on the same memory; bf16 and fp8 go by their bits, which numpy cannot name natively."""
    name = messages.dtype_name(array.dtype)
    if name in ("bfloat16", "float8_e4m3fn"):
        bits = array.view(np.uint16 if name == "bfloat16" else np.uint8)
        return torch.from_numpy(bits).view(getattr(torch, name))
    return torch.from_numpy(array)


def _started(arguments: Mapping[str, Any], path: str) -> Any:
    """vLLM's engine, in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except Exception as error:
        raise BridgeError(f"vLLM could not start on {path}: {type(error).__name__}: {error}", "setup") from error


def _join(shard: Shard, *, on_gpu: bool, batch_invariant: bool) -> None:
    """Before a shard starts: how it meets the others."""
    if not on_gpu:
        shard_memory.keep_apart(shard.owner)
    if batch_invariant:
        from qarl_bridge.engine import all_reduce

        all_reduce.pin()


class VllmEngine:
    """Implements server.Engine: a whole engine, or one shard of it. Everything runs on the calling thread."""

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
        """base: what of the weights lies in the trainer's memory; `expected` lacks it."""
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
        self._look_inside(activations)
        self._machine.after_load(self._modules)
        notes = [*versions.untested_note(vllm.__version__), self._machine.note]
        notes += [] if shard.is_whole else [f"{shard.size} shards, each with its own scales of activations"]
        notes += [f"{len(self._adapters)} layers with adapters"] if self._adapters else []
        notes += [f"{len(self._one_base.layers)} layers read the trainer's memory"] if self._one_base else []
        self.facts = messages.Facts(
            engine="vllm",
            engine_version=vllm.__version__,
            profile=self._machine.profile,
            isa=self._machine.isa,
            kernels=self._kernels(),
            model=messages.model_fingerprint(config),
            scheme=messages.scheme_hash(config.get("quantization_config")),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(self._engine.model_config.max_model_len),
            threads=self._machine.threads,
            pid=os.getpid(),
            notes=[note for note in notes if note],
            execution=versions.execution_of(options, on_gpu),
            departures=[*departures, *self._machine.left_to_vllm(self._modules)],
            records_routing=options.record_routing,
            device=staged_gpu.uuid_of_current() if on_gpu else b"",
            tensor_parallel_size=shard.size,
        )
        self._receiver = staged_gpu.receiver() if on_gpu else None

    def _opened(self, places: Sequence[one_base.Place], *, on_gpu: bool) -> Base:
        """Maps the base before the model is made, whose layers then have no weights of their own."""
        from qarl_bridge.engine import nvfp4_layers
        from qarl_bridge.engine.one_base import Base

        base = Base.open(places, on_gpu=on_gpu)
        nvfp4_layers.GIVEN.update(base.layers)
        return base

    def _look_inside(self, activations: str) -> None:
        """Makes the reader and the loader of weights: whole modules, of which a shard has parts."""
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
        """Linear layer -> class that computes it."""
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
        """Queue one completion with its own seed."""
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
        """Forget requests."""
        self._engine.abort_request(request_ids)
        if self._routing is not None:
            self._routing.forget(request_ids)

    def running(self) -> int:
        """Unfinished requests."""
        return self._engine.get_num_unfinished_requests()

    def step(self) -> list[Finished]:
        """One engine step (continuous batching); the requests that ended in it."""
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

    def load(self, parts: Parts, *, partial: bool = False) -> None:
        """Replace weights through vLLM's reload interface, then forget every cached key and value."""
        parts = self._base_of(self._on_torch(parts))
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
        """Loads some modules over a version that was loaded before."""
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
        """The tensors that are no adapters'; adapters are loaded as they are passed by."""
        held = self._adapters
        return parts if held is None else Sweeps(lambda: (held.load(part) for part in parts), lasts(parts))

    def _reload(self, parts: Parts) -> None:
        """Loads by vLLM's own loader, which keeps tensors until a layer is complete."""
        keep = lasts(parts)
        pairs = ((name, x if keep else x.to("cpu", copy=True)) for part in parts for name, x in part.items())
        self._worker.reload(expert_stacks.apart(pairs))

    def _prove_whole(self, parts: Parts) -> None:
        """The first load: may it, and the next ones, go module by module? See fast_load.py."""
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
        """A version in a buffer of the trainer's on this engine's GPU; see staged_gpu.py."""
        if not self.facts.device:
            raise BridgeError("this engine runs on a CPU", "unshared")
        if memory.device != self.facts.device:
            raise BridgeError("the trainer's arrays and this engine lie on different GPUs", "unshared")

        return staged_gpu.open_version(manifest, memory)

    def forget_trainer(self) -> None:
        """Unmap buffers of the trainer's on this engine's GPU that no version lies in; see staged_gpu.py."""
        if self.facts.device:
            staged_gpu.forget_trainer()

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """A version from another GPU, into memory of this engine's; see staged_gpu.py."""
        if self._receiver is None:
            raise BridgeError("this engine runs on a CPU", "unshared")

        return staged_gpu.receive_version(self._receiver, manifest, memory, check)

    def restore_initial(self) -> bool:
        """Reload the folder the engine was started from."""
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
        """The device that the engine computes on, as torch names it."""
        return self._torch.device(self._machine.profile)

    def tensor_on_device(self, array: Any) -> Any:
        """A tensor of a version, numpy's or torch's, where the engine computes."""
        return self._tensor(array).to(self.device)

    def outputs_of(self, module: str) -> list[int]:
        """Outputs of each linear layer that a live module fuses, of this shard; empty: it is none."""
        return list(getattr(self._modules.get(module), "output_partition_sizes", ()))

    def _tied_heads(self) -> dict[str, str]:
        """Heads that share their weight with an embedding: name of the head -> name of the embedding."""
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
        """Compare every live layer with the staged tensors: (layers, one-hot rows); see readback/linear.py."""
        if not self._shard.is_whole:
            whole = parts
            parts = Sweeps(lambda: (self._shard.part_of(part) for part in whole), lasts(whole))
        parts, held = self._with_base(self._on_torch(parts), partial), self._adapters
        if held is None:
            return self._readback.compare(parts, mode, seed, partial=partial)
        found = np.zeros(2, int)

        def base() -> Iterator[Mapping[str, Any]]:
            for part in parts:
                found[:] += held.compare(part, mode, np.random.default_rng(seed))
                yield {name: tensor for name, tensor in part.items() if not adapters.is_adapter(name)}

        layers, rows = self._readback.compare(base(), mode, seed, partial=partial)
        return layers + int(found[0]), rows + int(found[1])

    def _with_base(self, parts: Parts, partial: bool) -> Parts:
        """Adds the tensors that lie in the trainer's memory to those of a whole version."""
        base = self._one_base
        if base is None or partial:
            return parts
        return Sweeps(lambda: itertools.chain(parts, base.parts()), lasts(parts))

    def probe(self, prompt: list[int], modules: list[str]) -> list[messages.Recorded]:
        """One prefill of `prompt`, with what went into and came out of each module (positional arguments that are
        tensors, in order; a tuple of results as its parts). Where routed experts are recorded, they come last, as
        messages.ROUTING: int32 [T, layers, k].

        Raises:
          BridgeError("limits"): no such module, or a compiled engine, whose modules are not called one by one (under
            CUDA graphs, those of a prefill are).
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
        """Free the engine."""
        if self._receiver is not None:
            self._receiver.close()
        self._engine.engine_core.shutdown()


def _copies(value: Any) -> list[messages.Array]:
    """Every tensor in a tuple of arguments or results, by value."""
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
