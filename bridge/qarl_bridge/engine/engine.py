# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine, in this process: generate, load in place, read back, probe. versions.py hides its versions.

What is pinned, because each choice changes what is computed (and each is asserted in `facts`):

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

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np

from qarl_bridge.engine import shards, versions
from qarl_bridge.engine.cpu import build as cpu_build
from qarl_bridge.engine.readback import experts as readback_experts
from qarl_bridge.engine.routing_recorder import Recorder
from qarl_bridge.protocol import expert_stacks, formats, messages
from qarl_bridge.protocol.messages import BridgeError
from qarl_bridge.server.engine_api import Finished, Parts, Sweeps, lasts
from qarl_bridge.server.staged import Copy


def _int4_activations(config: Mapping[str, Any]) -> str:
    """What the int4 layers of this config.json take: "bf16" or "int8" (w4a8); all the same.

    vLLM's CPU engine runs all int4 layers one way.
    """
    int4 = [g for g in formats.groups_of(config) if g["weights"]["num_bits"] == 4 and g["weights"]["type"] == "int"]
    taken = [g.get("input_activations") for g in int4]
    found = {"bf16" if a is None else "int8" for a in taken} or {"bf16"}
    if len(found) > 1:
        raise BridgeError("w4a16 and w4a8 layers in one model: vLLM's CPU engine runs all int4 layers one way", "setup")
    return found.pop()


def _has_fp8(config: Mapping[str, Any]) -> bool:
    """Whether any layer of this config.json has fp8 weights."""
    return any(g["weights"]["type"] == "float" for g in formats.groups_of(config))


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


def _isa(torch: Any) -> str:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"sm{major}{minor}"
    return cpu_build.own(torch)


def _torch_view(torch: Any, array: np.ndarray) -> Any:
    """A torch tensor on the same memory; bf16 and fp8 go by their bits, which numpy cannot name natively."""
    name = messages.dtype_name(array.dtype)
    if name in ("bfloat16", "float8_e4m3fn"):
        bits = array.view(np.uint16 if name == "bfloat16" else np.uint8)
        return torch.from_numpy(bits).view(getattr(torch, name))
    return torch.from_numpy(array)


_CPU_NOTE = (
    "linear layers, norms, SwiGLU, RoPE, attention, experts, logits and log-probs are qarl_bridge's own: sums in "
    "float64, one arithmetic for every CPU"
)


class VllmEngine:
    """Implements server.Engine. Everything runs on the calling thread."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        expected: Mapping[str, messages.Expected],
        *,
        has_weights: bool,
        options: messages.EngineOptions,
    ):
        self._activations = _int4_activations(config)
        _prepare_environment(self._activations == "int8")
        cpu_build.prepare()
        import torch

        on_gpu = torch.cuda.is_available()
        self._shards = options.tensor_parallel_size
        if self._shards > 1:
            shards.check(config, options, on_gpu=on_gpu)
        if not on_gpu:
            threads = options.threads or len(os.sched_getaffinity(0))
            torch.set_num_threads(threads)  # before vLLM, which forbids changing it later
            cpu_build.choose(torch)
        else:
            threads = 0
            if self._activations == "int8":
                raise BridgeError(
                    "vLLM on CUDA drops the int8 activations of w4a8: use w4a16 or fp8, or the embedded sampler",
                    "setup",
                )
        try:
            import vllm
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine
        except ImportError as error:
            raise BridgeError(f"vLLM cannot be imported by {sys.executable}: {error}", "setup") from None
        logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
        self._torch = torch
        self.expected = expected
        self.has_weights = has_weights
        notes = versions.untested_note(vllm.__version__)
        if not on_gpu:
            readback_experts.check_shape(config)
            from qarl_bridge.engine.cpu import experts, layers, linear

            linear.register()
            layers.register()
            experts.register()
            notes.append(_CPU_NOTE)
        else:
            readback_experts.check_groups(config, batch_invariant=options.arithmetic == "batch_invariant")
        arguments = versions.engine_arguments(options, path=path, has_weights=has_weights, on_gpu=on_gpu)
        arguments |= shards.arguments(self._shards)
        execution = versions.execution_of(options, on_gpu)
        departures = ["vLLM's own kernels (rollout.engine.arithmetic=vllm)"] if options.arithmetic == "vllm" else []
        invariant = on_gpu and not departures
        if invariant:
            from qarl_bridge.engine.cuda import install

            departures += [versions.keep_sequences_whole(), install.install()]
            departures += [versions.keep_fp8_scales_in_order()] if _has_fp8(config) else []
            notes.append(install.NOTE)
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            raise BridgeError(f"vLLM could not start on {path}: {type(error).__name__}: {error}", "setup") from error
        self._worker = versions.Worker(self._engine)
        self._model = self._worker.model
        self._modules = dict(self._model.named_modules())
        if invariant:
            departures += install.left_to_vllm(self._modules)
        self._tied = self._tied_heads()
        self._routing: Recorder | None = self._worker.recorder
        self.met = self._worker.met
        from qarl_bridge.engine.readback.linear import ReadBack
        from qarl_bridge.server import staged_gpu

        self._readback = ReadBack(
            self._modules,
            self._tied,
            device=torch.device("cuda" if on_gpu else "cpu"),
            activations=self._activations,
            context=self._worker.config,
        )
        from qarl_bridge.engine.fast_load import WholeModules

        # Of whole modules a shard has parts, which vLLM's own loader cuts.
        self._whole = WholeModules(self._model, self._engine.model_config) if self._shards == 1 else None
        self._whole_is_proved = False
        self._after_load()
        kernels = self._kernels()
        self.facts = messages.Facts(
            engine="vllm",
            engine_version=vllm.__version__,
            profile="cuda" if on_gpu else "cpu",
            isa=_isa(torch),
            kernels=kernels,
            model=messages.model_fingerprint(config),
            scheme=messages.scheme_hash(config.get("quantization_config")),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(self._engine.model_config.max_model_len),
            threads=threads,
            pid=os.getpid(),
            notes=notes,
            execution=execution,
            departures=[departure for departure in departures if departure],
            records_routing=options.record_routing,
            device=staged_gpu.uuid_of_current() if on_gpu else b"",
        )
        self.facts = shards.with_size(self.facts, self._shards)
        self._receiver = staged_gpu.receiver() if self.facts.device else None

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
            top_k=sampling.top_k,
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

    def load(self, parts: Parts) -> None:
        """Replace all weights through vLLM's reload interface, then forget every cached key and value."""
        parts = self._on_torch(parts)
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
        self._after_load()
        self._worker.forget()

    def _reload(self, parts: Parts) -> None:
        """By vLLM's own loader, which keeps what it is given until a layer is complete."""
        keep = lasts(parts)
        pairs = ((name, x if keep else x.to("cpu", copy=True)) for part in parts for name, x in part.items())
        self._worker.reload(expert_stacks.apart(pairs))

    def _prove_whole(self, parts: Parts) -> None:
        """The first load: may it, and the next ones, go module by module? See fast_load.py."""
        assert self._whole is not None
        reason = self._compare_whole(parts, self._whole.sample(self.expected))
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

        from qarl_bridge.server import staged_gpu

        return staged_gpu.open_version(manifest, memory)

    def forget_trainer(self) -> None:
        """Unmap buffers of the trainer's on this engine's GPU that no version lies in; see staged_gpu.py."""
        if self.facts.device:
            from qarl_bridge.server import staged_gpu

            staged_gpu.forget_trainer()

    def receive(self, manifest: messages.Manifest, memory: messages.NcclMemory, check: Callable[[], None]) -> Copy:
        """A version from another GPU, into memory of this engine's; see staged_gpu.py."""
        if self._receiver is None:
            raise BridgeError("this engine runs on a CPU", "unshared")

        from qarl_bridge.server import staged_gpu

        return staged_gpu.receive_version(self._receiver, manifest, memory, check)

    def restore_initial(self) -> bool:
        """Reload the folder the engine was started from."""
        if not self.has_weights:
            return False
        self._whole_is_proved = False
        self._worker.reload()
        self._after_load()
        self._worker.forget()
        return True

    def _on_torch(self, parts: Parts) -> Parts:
        def sweep() -> Iterator[Mapping[str, Any]]:
            return ({name: self._tensor(array) for name, array in part.items()} for part in parts)

        return Sweeps(sweep, lasts(parts))

    def _tensor(self, array: Any) -> Any:
        return _torch_view(self._torch, array) if isinstance(array, np.ndarray) else array

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

    def _after_load(self) -> None:
        """vLLM's CPU products are made from the weights as they are now: of a tied head, too, which no reload names."""
        if self._torch.cuda.is_available():
            return
        from qarl_bridge.engine.cpu.linear import Float64Linear

        for module in self._modules.values():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = Float64Linear(module)

    # Looking inside --------------------------------------------------------------------------------------------------

    def read_back(self, parts: Parts, mode: str, seed: int) -> tuple[int, int]:
        """Compare every live layer with the staged tensors: (layers, one-hot rows); see readback/linear.py."""
        if self._shards > 1:
            rank, whole = int(os.environ["RANK"]), parts
            parts = Sweeps(lambda: (shards.part_of(part, rank, self._shards) for part in whole), lasts(whole))
        return self._readback.compare(self._on_torch(parts), mode, seed)

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
