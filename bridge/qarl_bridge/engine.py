# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine, in this process: generate, load in place, read back.

What is pinned, because each choice changes what is computed (and each is asserted in `facts`):

  * bf16 activations, eager mode: one rounding per op as the learner mirrors it, no inductor fusions;
  * the CPU's int4 path: `VLLM_CPU_INT4_W4A8` is set explicitly (vLLM's default quantises activations silently when AMX
    is there), and AMX tiles are requested from the kernel, without which that path dies with SIGILL;
  * log-probs of the distribution drawn from (`processed_logprobs`), for the drawn token only;
  * nothing is taken from generation_config.json.

Weights are replaced through vLLM's own `reload_weights`, in checkpoint format, whole fused modules in layer order.

Functional read-back. After a load, one-hot rows are pushed through every live linear layer; what comes out is the
column of the weight matrix that the kernel really uses, whatever layout it keeps. Expected values are computed from the
staged tensors by the kernel's own formula:

    bf16, int4    y[n] = w[n, k] = bf16(q*s)                     exact
    int8, w4a8    s_x = 1/127, x_q = 127: y[n] = bf16((127*q*s_x)*s_w)
    fp8           s_x = 1/448, x_q = 448: y[n] = bf16((448*q*s_x)*s_w)       (each in either order of the products)

Rows of embeddings, norms and biases are compared as stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from qarl_bridge import wire
from qarl_bridge.server import Finished
from qarl_bridge.wire import BridgeError

SAMPLED_ROWS = 16  # one-hot rows per layer and publish in "sampled" mode; another 16 each time
_READBACK_CHUNK = 256  # one-hot rows pushed at once in "full" mode


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to start vLLM. Zero means vLLM's or the model's own value, except `threads` (0: every CPU allowed)."""

    max_model_len: int = 0
    max_num_seqs: int = 256
    kv_cache_gb: float = 0.0
    gpu_memory_utilization: float = 0.5
    seed: int = 0
    threads: int = 0


def _int8_activations_for_int4(config: Mapping[str, Any]) -> bool:
    """Whether the int4 layers of this config.json take int8 activations (w4a8). vLLM's CPU engine runs all one way."""
    groups = (config.get("quantization_config") or {}).get("config_groups", {}).values()
    int4 = [g for g in groups if g["weights"]["num_bits"] == 4 and g["weights"]["type"] == "int"]
    found = {g.get("input_activations") is not None for g in int4}
    if len(found) > 1:
        raise BridgeError("w4a16 and w4a8 layers in one model: vLLM's CPU engine runs all int4 layers one way", "setup")
    return True in found


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


def _isa(torch: Any) -> str:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"sm{major}{minor}"
    if torch.cpu._is_amx_tile_supported():
        return "amx"
    if torch.cpu._is_avx512_bf16_supported():
        return "avx512_bf16"
    return "avx512" if torch.cpu._is_avx512_supported() else "avx2"


def _torch_view(torch: Any, array: np.ndarray) -> Any:
    """A torch tensor on the same memory; bf16 and fp8 go by their bits, which numpy cannot name natively."""
    name = wire.dtype_name(array.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "not writable": right, and nothing writes
        if name in ("bfloat16", "float8_e4m3fn"):
            bits = array.view(np.uint16 if name == "bfloat16" else np.uint8)
            return torch.from_numpy(bits).view(getattr(torch, name))
        return torch.from_numpy(array)


def _numpy(tensor: Any) -> np.ndarray:
    """float32 values of a torch tensor of any float dtype."""
    return tensor.detach().float().cpu().numpy()


# ISA -> the learner's `quant.numerics` profile.
_CPU_PROFILES = {"amx": "cpu_amx", "avx512_bf16": "cpu_avx512_bf16", "avx512": "cpu_avx2", "avx2": "cpu_avx2"}
_PORTABLE_NOTES = {
    "PortableWNA16LinearKernel": "vLLM has no int4 kernel for this CPU; qarl_bridge's own computes bf16(x @ bf16(q*s))",
    "PortableLinear": "vLLM has no fast bf16 matmul for this CPU; qarl_bridge's computes bf16(x_f32 @ w_f32)",
    "PortableInt8LinearKernel": "oneDNN's int8 product saturates on this CPU; qarl_bridge's is exact",
}

# vLLM's fused modules, as Qwen2, Qwen3, Llama and their kin name them: fused name -> shards in row order.
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EXPERT = re.compile(r"\.experts\.\d+\.")


class VllmEngine:
    """Implements server.Engine. Everything runs on the calling thread."""

    def __init__(
        self,
        path: str,
        config: Mapping[str, Any],
        expected: Mapping[str, wire.Expected],
        *,
        has_weights: bool,
        options: Options,
    ):
        self._w4a8 = _int8_activations_for_int4(config)
        _prepare_environment(self._w4a8)
        import torch

        if not torch.cuda.is_available():
            threads = options.threads or len(os.sched_getaffinity(0))
            torch.set_num_threads(threads)  # before vLLM, which forbids changing it later
            if torch.cpu._is_amx_tile_supported():
                torch.cpu._init_amx()
        else:
            threads = 0
            if self._w4a8:
                raise BridgeError(
                    "vLLM on CUDA drops the int8 activations of w4a8: use w4a16, or w4a8 on a CPU", "setup"
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
        notes: list[str] = []
        if not torch.cuda.is_available():
            from qarl_bridge import portable_kernels

            portable_kernels.register()
        arguments: dict[str, Any] = {
            "model": path,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "dtype": "bfloat16",
            "seed": options.seed,
            "load_format": "safetensors" if has_weights else "dummy",
            "logprobs_mode": "processed_logprobs",
            "generation_config": "vllm",
            "gpu_memory_utilization": options.gpu_memory_utilization,
            "max_num_seqs": options.max_num_seqs,
            "disable_log_stats": True,
            "trust_remote_code": False,
        }
        if options.max_model_len:
            arguments["max_model_len"] = options.max_model_len
        if options.kv_cache_gb:
            arguments["kv_cache_memory_bytes"] = int(options.kv_cache_gb * 2**30)
        try:
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except Exception as error:
            raise BridgeError(f"vLLM could not start on {path}: {type(error).__name__}: {error}", "setup") from error
        self._worker = self._engine.model_executor.driver_worker.worker
        self._model = self._worker.get_model()
        self._modules = dict(self._model.named_modules())
        self._tied = self._tied_heads()
        isa = _isa(torch)
        self._portable_bf16 = isa == "avx2"
        self._after_load()
        profile = "cuda" if isa.startswith("sm") else _CPU_PROFILES[isa]
        kernels = self._kernels()
        for label, why in _PORTABLE_NOTES.items():
            if label in kernels.values():
                notes.append(f"{label}: {why}")
        self.facts = wire.Facts(
            engine="vllm",
            engine_version=vllm.__version__,
            profile=profile,
            isa=isa,
            kernels=kernels,
            model=wire.model_fingerprint(config),
            scheme=wire.scheme_hash(config.get("quantization_config")),
            vocab_size=int(config["vocab_size"]),
            max_model_len=int(self._engine.model_config.max_model_len),
            threads=threads,
            pid=os.getpid(),
            notes=notes,
        )
        self._logprobs_checked = False

    def _kernels(self) -> dict[str, str]:
        """Linear layer -> class that computes it."""
        found = {}
        for name, module in self._modules.items():
            if not hasattr(module, "quant_method"):
                continue
            kernel = getattr(getattr(module, "scheme", None), "kernel", None)
            computing = kernel or getattr(module, "scheme", None) or module.quant_method
            label = type(computing).__name__
            if self._portable_bf16 and hasattr(module, "cpu_linear"):
                label = "PortableLinear"
            method = getattr(kernel, "linear_method", None)
            if method is not None:  # int8 on a CPU: two code paths with two orders of rescaling
                label += method.__name__.replace("_apply_weights", "")
            found[name] = label
        return found

    # Generating ------------------------------------------------------------------------------------------------------

    def submit(self, request_id: str, draw: wire.Draw, sampling: wire.Sampling) -> None:
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
            finished.append(Finished(output.request_id, tokens, logprobs, reason))
        return finished

    # Loading ---------------------------------------------------------------------------------------------------------

    def load(self, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
        """Replace all weights through vLLM's reload interface, then forget every cached key and value."""
        views = ((name, _torch_view(self._torch, array)) for name, array in tensors)
        with self._vllm_config():
            self._worker.reload_weights(weights_iterator=views)
        self._after_load()
        self._forget()

    def restore_initial(self) -> bool:
        """Reload the folder the engine was started from."""
        if not self.has_weights:
            return False
        with self._vllm_config():
            self._worker.reload_weights()
        self._after_load()
        self._forget()
        return True

    def _vllm_config(self) -> contextlib.AbstractContextManager:
        """The config context some layers look up while they are rebuilt."""
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._engine.vllm_config)

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
        if not self._torch.cuda.is_available():
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            # vLLM packs a copy of the weight for its CPU product, and a reload packs anew only what was sent by name: a
            # tied head would go on multiplying with the weights before.
            for head in self._tied:
                dispatch_cpu_unquantized_gemm(self._modules[head], remove_weight=False)
        if self._portable_bf16:
            from qarl_bridge.portable_kernels import portable_linear

            for module in self._modules.values():
                if hasattr(module, "cpu_linear"):  # vLLM sets it anew at every load
                    module.cpu_linear = portable_linear()

    def _forget(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM refused to reset its prefix cache")
        # Zeroed as well: if the old weights ever produced a NaN, it would live on in reused cache pages.
        for cache in self._worker.model_runner.kv_caches:
            cache.zero_()

    # Reading back ----------------------------------------------------------------------------------------------------

    def read_back(self, tensors: Mapping[str, np.ndarray], mode: str, seed: int) -> tuple[int, int]:
        """Compare every live layer with the staged tensors; see the module docstring.

        Returns:
          (layers compared, one-hot rows pushed); raises BridgeError("engine") naming the first layer that differs.
        """
        rng = np.random.default_rng(seed)
        layers = rows = 0
        seen: set[str] = set()
        for name, module in self._modules.items():
            shards = self._shards(name, tensors)
            if shards is None:
                continue
            seen.update(n for shard in shards for n in shard.names)
            if shards[0].kind == "stored":
                self._compare_stored(name, module, shards[0])
            else:
                width = shards[0].width
                picked = (
                    np.arange(width)
                    if mode == "full"
                    else np.sort(rng.choice(width, min(SAMPLED_ROWS, width), replace=False))
                )
                self._compare_functional(name, module, shards, picked)
                rows += len(picked)
            layers += 1
        unseen = [n for n in tensors if n not in seen and not _EXPERT.search(n) and not n.endswith("weight_shape")]
        if unseen:
            raise BridgeError(
                f"read-back found no live layer for {len(unseen)} tensor(s), first: {unseen[0]}", "engine"
            )
        return layers, rows

    def _shards(self, name: str, tensors: Mapping[str, np.ndarray]) -> list[_Shard] | None:
        if name in self._tied:  # published as the embedding, which is stored; here it is multiplied with
            shared = _Shard.find(self._tied[name], tensors)
            return None if shared is None else [dataclasses.replace(shared, kind="dense")]
        prefix, _, leaf = name.rpartition(".")
        parts = _FUSED.get(leaf, (leaf,))
        shards = [_Shard.find(f"{prefix}.{part}" if prefix else part, tensors) for part in parts]
        if any(shard is None for shard in shards):
            return None
        if not hasattr(self._modules[name], "quant_method") or "Embedding" in type(self._modules[name]).__name__:
            shards = [dataclasses.replace(shard, kind="stored") for shard in shards if shard is not None]
        return [shard for shard in shards if shard is not None]

    def _compare_stored(self, name: str, module: Any, shard: _Shard) -> None:
        live = _numpy(module.weight)[: shard.weight.shape[0]]
        if not np.array_equal(live, shard.weight.astype(np.float32)):
            raise BridgeError(f"read-back: {name} does not hold the published values", "engine")

    def _compare_functional(self, name: str, module: Any, shards: list[_Shard], picked: np.ndarray) -> None:
        torch = self._torch
        device = next(self._model.parameters()).device
        bias = module.bias if getattr(module, "bias", None) is not None else None
        if bias is not None:
            want = np.concatenate([shard.bias for shard in shards if shard.bias is not None]).astype(np.float32)
            if not np.array_equal(_numpy(bias), want):
                raise BridgeError(f"read-back: the bias of {name} does not hold the published values", "engine")
        for start in range(0, len(picked), _READBACK_CHUNK):
            columns = picked[start : start + _READBACK_CHUNK]
            one_hot = torch.zeros((len(columns), shards[0].width), dtype=torch.bfloat16, device=device)
            one_hot[torch.arange(len(columns)), torch.from_numpy(columns)] = 1
            with torch.inference_mode(), self._vllm_config():
                got = _numpy(module.quant_method.apply(module, one_hot, None))
            wanted = [
                np.concatenate(parts, axis=1)
                for parts in zip(*(s.columns(columns, self._w4a8) for s in shards), strict=True)
            ]
            got = got[:, : wanted[0].shape[1]]  # a padded vocabulary has rows of its own
            wrong = np.logical_and.reduce([got != want for want in wanted]) | ~np.isfinite(got)
            if wrong.any():
                row, out = (int(i) for i in np.argwhere(wrong)[0])
                raise BridgeError(
                    f"read-back: {name} holds {got[row, out]!r} at [{out}, {int(columns[row])}], published was "
                    f"{wanted[0][row, out]!r} ({int(wrong.sum())} of {wrong.size} values differ)",
                    "engine",
                )

    def close(self) -> None:
        """Free the engine."""
        self._engine.engine_core.shutdown()


@dataclasses.dataclass(frozen=True)
class _Shard:
    """One published linear weight (or a plain stored one) under its Hugging Face prefix."""

    kind: str  # "stored" | "dense" | "int8" | "int4"
    names: tuple[str, ...]
    weight: np.ndarray
    scale: np.ndarray | None
    bias: np.ndarray | None
    width: int  # K

    @staticmethod
    def find(prefix: str, tensors: Mapping[str, np.ndarray]) -> _Shard | None:
        """The shard published under `prefix`, if any."""
        bias_name = f"{prefix}.bias"
        bias = tensors.get(bias_name)
        extra = (bias_name,) if bias is not None else ()
        scale = tensors.get(f"{prefix}.weight_scale")
        packed = tensors.get(f"{prefix}.weight_packed")
        if packed is not None:
            names = (f"{prefix}.weight_packed", f"{prefix}.weight_scale", *extra)
            return _Shard("int4", names, packed, scale, bias, packed.shape[1] * 8)
        weight = tensors.get(f"{prefix}.weight")
        if weight is None:
            return None
        if scale is not None:
            kind = "int8" if weight.dtype == np.int8 else "fp8"
            return _Shard(
                kind, (f"{prefix}.weight", f"{prefix}.weight_scale", *extra), weight, scale, bias, weight.shape[1]
            )
        kind = "dense" if weight.ndim == 2 else "stored"
        return _Shard(kind, (f"{prefix}.weight", *extra), weight, None, bias, weight.shape[-1])

    def columns(self, picked: np.ndarray, w4a8: bool) -> list[np.ndarray]:
        """What one-hot rows at `picked` must return: alternatives [len(picked), N] float32, any of which is right."""
        bf16 = wire.DTYPES["bfloat16"]
        if self.kind == "dense":
            return [self.weight[:, picked].T.astype(np.float32)] * 2
        assert self.scale is not None
        scale = self.scale.astype(np.float32)
        if self.kind == "int4":
            words = self.weight[:, picked // 8].view(np.uint32) >> (4 * (picked % 8)).astype(np.uint32)
            codes = (words & 0xF).T.astype(np.float32) - 8
            scale = scale[:, picked // (self.width // scale.shape[1])].T
            if not w4a8:
                return [(codes * scale).astype(bf16).astype(np.float32)] * 2
        else:
            codes, scale = self.weight[:, picked].T.astype(np.float32), scale.reshape(1, -1)
        top = np.float32(448 if self.kind == "fp8" else 127)
        x_scale, acc = np.float32(1) / top, top * codes  # both exact as the kernel has them: |acc| < 2^24
        return [
            ((acc * x_scale) * scale).astype(bf16).astype(np.float32),
            ((acc * scale) * x_scale).astype(bf16).astype(np.float32),
        ]
