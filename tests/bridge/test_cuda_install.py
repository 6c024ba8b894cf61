# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: what of vLLM's own classes the bridge puts its operations into on CUDA, and what it leaves alone."""

import pytest

from tests.reference.forks import ASSEMBLED, INTERPRETED, forks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a program in a process of its own, where vLLM's classes are patched; vLLM is imported once."""
    imports = (
        INTERPRETED + "from qarl_bridge.engine.cuda import experts as cuda_experts, int4, nvfp4, ops\n" + ASSEMBLED
    )
    with forks(imports, tmp_path_factory.mktemp("programs")) as forked:
        yield forked


def test_a_tensor_that_is_not_on_a_gpu_is_vllms_own_business(run):
    out = run("""
        from qarl_bridge.engine.cuda import install
        from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
        from vllm.model_executor.layers.layernorm import RMSNorm

        called = []
        UnquantizedEmbeddingMethod.apply = lambda self, layer, x, bias=None: called.append("head")
        RMSNorm.forward_cuda = lambda self, x, residual=None: called.append("norm")
        print(repr(install.install()))
        print(repr(install.install()))  # a second engine of the process

        class Layer:
            weight = torch.zeros(16, 8, dtype=torch.bfloat16)
            pass_weight, variance_size_override = True, None

        x = torch.zeros(2, 8, dtype=torch.bfloat16)
        UnquantizedEmbeddingMethod().apply(Layer(), x)
        RMSNorm.forward_cuda(Layer(), x)
        assert called == ["head", "norm"], called

        from vllm.v1.worker.gpu.sample import logprob

        ranks = torch.ones(3, dtype=torch.int64)
        logprob._ranks_kernel[(3,)](ranks, x, 8, None, 8, BLOCK_SIZE=8)
        assert not ranks.any()
    """)
    first, second = out.strip().splitlines()[-2:]
    assert first == second == "''"


def test_few_rows_are_multiplied_with_words_and_many_with_what_they_stand_for(run):
    run("""
        torch.manual_seed(0)
        kind = int4.BatchInvariantInt4LinearKernel
        kernel = kind.__new__(kind)
        kernel.w_q_name, kernel.w_s_name = "packed", "scale"
        # The interpreter has no bfloat16 arithmetic.
        room = int4._rooms[torch.device("cpu")] = torch.empty(128 * 256).half()
        int4.PACKED_ROWS = 4
        for n, k in ((64, 256), (128, 256), (32, 128)):
            layer = torch.nn.Module()
            words = torch.randint(-(2**31), 2**31 - 1, (n, k // 8)).int()
            layer.packed = torch.nn.Parameter(words, requires_grad=False)
            layer.scale = torch.nn.Parameter(torch.randint(2, 9, (n, k // 128)).bfloat16() / 4, requires_grad=False)
            kernel.process_weights_after_loading(layer)
            x = torch.randn(2, 3, k).half()
            many = kernel.apply_weights(layer, x)
            few = kernel.apply_weights(layer, x[:1])
            codes = ((layer.packed[..., None] >> (4 * torch.arange(8))) & 15).view(n, k) - 8
            served = codes * layer.scale.float().repeat_interleave(128, 1)
            torch.testing.assert_close(many.float(), x.float() @ served.t(), rtol=1e-2, atol=0.5)
            torch.testing.assert_close(few, many[:1])
        assert int4._rooms[torch.device("cpu")] is room
    """)


def test_layers_with_zero_points_are_held_as_they_are_multiplied_with_t_of_each_part(run):
    run("""
        import types
        from qarl_bridge.engine import asym_layers
        from qarl_bridge.engine.cuda import asym, asym_ops
        from qarl_bridge.protocol.errors import BridgeError

        torch.manual_seed(0)
        global FLOAT
        FLOAT = tl.float32
        asym.current_platform = types.SimpleNamespace(is_device_capability=lambda number: number == 90)
        int4._rooms[torch.device("cpu")] = torch.empty(96 * 256)  # the interpreter has no bfloat16 arithmetic
        int4.PACKED_ROWS = 4
        n, k, group = 96, 256, 64

        def layer_of(n, k, group):
            layer = torch.nn.Module()
            layer.logical_widths = [64, 16, n - 80]
            levels = torch.randint(1, 100, (2, n, k // group)).to(torch.uint8)
            held = {
                "weight_u2": torch.randint(0, 256, (n, k // 4)).to(torch.uint8),
                "weight_u1": torch.randint(0, 256, (n, k // 8)).to(torch.uint8),
                "weight_zero_point": levels[0],
                "weight_scale": levels[1].view(torch.float8_e4m3fn),
                "weight_tensor_scale": torch.tensor([0.25, 0.5, 2.0]),
            }
            for name, value in held.items():
                layer.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
            return layer, held

        layer, held = layer_of(n, k, group)

        def plane(width):
            lanes = held[f"weight_u{width}"][..., None] >> width * torch.arange(8 // width)
            return (lanes & (2**width - 1)).view(n, k)

        codes = 2 * plane(2) + plane(1)
        steps = held["weight_scale"].float() * torch.tensor([0.25] * 64 + [0.5] * 16 + [2.0] * 16)[:, None]
        zeros = held["weight_zero_point"].repeat_interleave(group, 1).int()
        weight = ((codes * 32 - zeros) * steps.repeat_interleave(group, 1)).bfloat16().float()
        kernel = asym.BatchInvariantAsymmetricLinear(3, group, False)
        before = sum(p.numel() * p.element_size() for p in layer.parameters())
        kernel.process_weights_after_loading(layer)
        assert before + 2 * n - 12 == sum(p.numel() * p.element_size() for p in layer.parameters())
        assert torch.equal(kernel.words(layer).decoded().float(), weight)
        one = torch.zeros(6, k)
        one[range(6), [0, 5, 77, 128, 200, 255]] = 1.0
        for rows in (1, 4, 6):  # words as they are, and decoded
            found = kernel.apply_weights(layer, one[None, :rows])
            assert torch.equal(found[0].float(), weight.t()[[0, 5, 77, 128, 200, 255]][:rows])
        few = asym.BatchInvariantAsymmetricLinear(3, group, False, activation_bits=2)
        assert few.zeros == "weight_zero_point_a2"
        x = torch.randn(1, 6, k)
        for rows in (1, 6):
            found = few.apply_weights(layer, x[:, :rows])
            assert torch.equal(found, kernel.apply_weights(layer, asym_layers.rounded_rows(x[:, :rows], 2, group)))
        # Half of the inputs are others of them once more, or zeros.
        split, _ = layer_of(n, k, group)
        for name, value in held.items():
            getattr(split, name).data.copy_(value)
        twice = torch.full((3, 128), 128, dtype=torch.int32)
        twice[:, :2] = torch.tensor([5, 77])
        split.register_parameter("input_index", torch.nn.Parameter(twice, requires_grad=False))
        wider = asym.BatchInvariantAsymmetricLinear(3, group, False, 1.0)
        wider.process_weights_after_loading(split)
        every = torch.eye(256)
        both = every[[0, 5, 77]] + torch.cat([torch.zeros(1, 256), every[[128, 129]]])
        found = wider.apply_weights(split, torch.eye(128)[[0, 5, 77]])
        assert torch.equal(found, kernel.apply_weights(layer, both))
        for shape in ((96, 192, 64), (92, 256, 64), (96, 384, 48)):
            other = asym.BatchInvariantAsymmetricLinear(3, shape[2], False)
            try:
                other.process_weights_after_loading(layer_of(*shape)[0])
            except BridgeError as error:
                assert "a layer with zero points" in str(error)
            else:
                raise AssertionError(shape)
    """)


def test_nvfp4_layers_are_held_as_they_are_multiplied_with_a_number_for_each_part(run):
    run("""
        torch.manual_seed(0)
        kind = nvfp4.BatchInvariantNvFp4LinearKernel
        kernel = kind.__new__(kind)
        int4._rooms[torch.device("cpu")] = torch.empty(128 * 256).half()  # the interpreter has no bfloat16 arithmetic
        int4.PACKED_ROWS = 4
        n, k, widths, divisors = 128, 256, [64, 32, 32], torch.tensor([512.0, 448.0, 2688.0])
        layer = torch.nn.Module()
        packed = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
        scale = (torch.rand(n, k // 16) * 4).to(torch.float8_e4m3fn)
        scale.view(torch.uint8)[0, :3] = torch.tensor([7, 8, 1]).to(torch.uint8)  # flushed, 2^-6, flushed
        for name, value in (("packed", packed), ("scale", scale), ("global_scale", divisors)):
            layer.register_parameter(f"weight_{name}", torch.nn.Parameter(value, requires_grad=False))
        layer.logical_widths = widths
        kernel.process_weights_after_loading(layer)
        assert [name for name, _ in layer.named_parameters()] == ["weight_scale", "weight_global_scale", "weight"]
        assert layer.weight.element_size() * layer.weight.numel() == packed.numel()

        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        codes = torch.stack([packed & 15, packed >> 4], -1).view(n, k).long()
        s = torch.where(scale.float() < 2.0**-6, 0.0, scale.float())
        served = torch.cat([values, -values])[codes] * s.repeat_interleave(16, 1)
        assert not served[0, :16].any() and served[0, 16:32].any() and not served[0, 32:48].any()
        factor = torch.repeat_interleave(1 / divisors, torch.tensor(widths))
        x, bias = torch.randn(2, 3, k).half(), torch.randn(n).half()
        many, few = kernel.apply_weights(layer, x, bias), kernel.apply_weights(layer, x[:1], bias)
        want = ops.product(x.view(6, k), served.half(), bias=bias, factor=factor, out_dtype=torch.bfloat16)
        assert torch.equal(many, want.view(2, 3, n))
        assert torch.equal(few, many[:1])
    """)


def test_int4_experts_are_laid_out_as_they_are_multiplied_however_vllm_holds_them_for_loading(run):
    run("""
        import types

        torch.manual_seed(0)
        D, F, E = 256, 128, 6
        theirs = cuda_experts.CompressedTensorsWNA16MoEMethod.create_weights
        loader = lambda *_: None

        def transposed(self, layer, *args, **named):
            theirs(self, layer, *args, **named)
            for name in ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"):
                held = getattr(layer, name)
                turned = torch.nn.Parameter(held.data.transpose(1, 2).contiguous(), requires_grad=False)
                turned.__dict__.update(vars(held), is_transposed=True)
                setattr(layer, name, turned)

        shapes = {"w13": (2 * F, D), "w2": (D, F)}
        words = {w: torch.randint(-(2**31), 2**31 - 1, (E, n, k // 8)).int() for w, (n, k) in shapes.items()}
        scales = {w: torch.rand(E, n, k // 32).bfloat16() for w, (n, k) in shapes.items()}
        for create in (theirs, transposed):
            cuda_experts.CompressedTensorsWNA16MoEMethod.create_weights = create
            method = cuda_experts.BatchInvariantWNA16MoEMethod.__new__(cuda_experts.BatchInvariantWNA16MoEMethod)
            method.moe = types.SimpleNamespace(is_act_and_mul=True, has_bias=False)
            method.strategy, method.num_bits, method.packed_factor, method.group_size = "group", 4, 8, 32
            method.symmetric = True
            layer = torch.nn.Module()
            method.create_weights(layer, E, D, F, torch.bfloat16, weight_loader=loader)
            for which in shapes:
                for part, values in (("weight_packed", words), ("weight_scale", scales)):
                    param = getattr(layer, f"{which}_{part}")
                    assert not param.is_transposed and param.weight_loader is loader
                    param.data.copy_(values[which])
            method.process_weights_after_loading(layer)
            for which, (n, k) in shapes.items():
                packed, scale = (getattr(layer, f"{which}_{part}") for part in ("weight_packed", "weight_scale"))
                assert torch.equal(packed, ops.interleaved(words[which]))
                assert torch.equal(scale, scales[which].transpose(1, 2))
    """)


def test_a_norm_writes_codes_once_an_int8_layer_asked_for_them(run):
    run("""
        import types
        from qarl_bridge.engine.cuda import install, int8, norm_ops
        from vllm import _custom_ops
        from vllm.model_executor.kernels.linear.scaled_mm.cutlass import CutlassInt8ScaledMMLinearKernel as Kernel

        made = []

        def plain(input, scale=None, azp=None, symmetric=True):
            made.append((scale, symmetric))
            return torch.zeros(input.shape, dtype=torch.int8), torch.ones(len(input), 1), None

        def normed(x, weight, eps, residual, codes):
            if codes is not None:
                codes[0].fill_(7)
                codes[1].fill_(3)
            return x + 1 if residual is None else (x + 1, residual)

        _custom_ops.scaled_int8_quant = plain
        _custom_ops.cutlass_scaled_mm = lambda codes, weight, scale_a, **named: (codes.float() * scale_a).sum()
        norm_ops.rms_norm = normed
        install._serves = lambda x, weight: True
        int8.install()
        int8.install()
        norm = types.SimpleNamespace(
            pass_weight=True, variance_size_override=None, weight=torch.ones(16), variance_epsilon=0.0
        )
        forward, static = install._norm(None), None
        kernel = Kernel.__new__(Kernel)
        kernel._get_layer_params = lambda layer: (None, None, static, None, None)
        layer = lambda x: float(kernel.apply_weights(None, x))
        x = torch.zeros(3, 16, dtype=torch.bfloat16)
        first = forward(norm, x)
        assert first.int8_codes is None and not made
        assert layer(first) == 0 and len(made) == 1  # vLLM quantizes, and the norm is asked
        for y in (forward(norm, x), forward(norm, x, x)[0]):
            assert layer(y) == 3 * 16 * 7 * 3 and len(made) == 1
        assert layer(y + 0) == 0 and len(made) == 2  # another tensor has no codes
        static = torch.ones(1)  # and where a scale is given the codes are others
        assert layer(y) == 0 and made[-1] == (static, True)
        _custom_ops.scaled_int8_quant(y, symmetric=False)
        assert made[-1] == (None, False)
    """)


def test_heads_norms_and_rotary_embedding_are_one_kernel_where_both_are_plain(run):
    run("""
        import types
        from qarl_bridge.engine.cuda import install, norm_ops

        torch.manual_seed(0)
        install._serves = lambda x, weight: True
        RotaryEmbedding = type("RotaryEmbedding", (), {"is_neox_style": True, "rotary_dim": 16})
        rotary = RotaryEmbedding()
        rotary.cos_sin_cache = torch.rand(9, 16).half()
        norms = [
            types.SimpleNamespace(pass_weight=True, variance_size_override=None, weight=torch.rand(16).half(),
                                  variance_epsilon=1e-6)
            for _ in "qk"
        ]
        layer = types.SimpleNamespace(
            rotary_emb=rotary, q_norm=norms[0], k_norm=norms[1], head_dim=16, q_size=32, kv_size=16,
            qkv_proj=lambda x: (x, None), o_proj=lambda x: (x, None), attn=lambda q, k, v: torch.cat([q, k, v], -1),
        )
        forward = install._attention(lambda *given: "vLLM's")
        x, positions = torch.randn(5, 64).half(), torch.tensor([3, 0, 8, 1, 1])
        y = forward(layer, positions, x)
        table = rotary.cos_sin_cache
        assert torch.equal(y[:, 48:], x[:, 48:])
        gains = norms[0].weight, norms[1].weight
        assert torch.equal(y[:, :48], norm_ops.rotated_norms(x[:, :48], 2, gains, 1e-6, positions, table))
        assert forward(layer, positions.expand(3, 5), x) == "vLLM's"  # positions of images
        rotary.is_neox_style = False
        assert forward(layer, positions, x) == "vLLM's"
        rotary.is_neox_style, norms[1].variance_size_override = True, 8
        assert forward(layer, positions, x) == "vLLM's"
        layer.rotary_emb = types.SimpleNamespace(is_neox_style=True, rotary_dim=16, cos_sin_cache=table)
        assert forward(layer, positions, x) == "vLLM's"
    """)
