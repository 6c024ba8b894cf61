# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: experts on CUDA, under Triton's interpreter on a CPU (in float16: it has
no bfloat16), against the same formulas in torch. What tensor cores do is tests/gpu's."""

import subprocess
import sys
import textwrap

import pytest

from tests.reference.forks import ASSEMBLED, forks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

COMMON = """
    import os
    os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from qarl_bridge.engine.cuda import ops, expert_ops as own

    torch.manual_seed(0)

    def align(ids, height, number):
        '''vLLM's moe_align_block_size, in torch.'''
        flat, copies, experts = ids.flatten(), [], []
        for e in range(number):
            mine = (flat == e).nonzero()[:, 0].tolist()
            tiles = -(-len(mine) // height)
            copies += mine + [len(flat)] * (tiles * height - len(mine))
            experts += [e] * tiles
        more = [len(flat)] * (2 * height), [-1, -1]  # behind the end there is anything
        end = torch.tensor([len(copies)], dtype=torch.int32)
        return *(torch.tensor(a + b, dtype=torch.int32) for a, b in zip((copies, experts), more)), end

    def silu_and_mul(x):
        gate, up = x.float().chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    M, D, F, E, k = 37, 256, 128, 6, 3
    ids = torch.stack([torch.randperm(E - 1)[:k] for _ in range(M)]).int()  # nobody asks the last expert
    weights = torch.rand(M, k)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a program after `COMMON` in a process of its own, where the interpreter stays."""
    preamble = textwrap.dedent(COMMON) + ASSEMBLED + "own._finished = ops._finished\n"
    with forks(preamble, tmp_path_factory.mktemp("programs")) as forked:
        yield forked


def test_an_moe_model_is_its_experts_products_weighted_in_float64(run):
    run("""
        x = torch.randn(M, D).half()
        w13, w2 = (torch.randn(E, 2 * F, D) * 0.1).half(), (torch.randn(E, D, F) * 0.1).half()
        got = own.experts(x, weights, ids, (w13, None, None), (w2, None, None), align=align, activation=silu_and_mul)
        outputs = torch.empty(M, k, D).half()
        for m in range(M):
            for j in range(k):
                e = ids[m, j]
                hidden = silu_and_mul((x[m].float() @ w13[e].float().T).half())
                outputs[m, j] = (hidden.float() @ w2[e].float().T).half()
        want = (outputs.double() * weights[..., None].double()).sum(1).float().half()
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
        assert torch.equal(own.weighted_sum(outputs.view(M * k, D), weights), want)
        few = own.experts(
            x[:5], weights[:5], ids[:5], (w13, None, None), (w2, None, None), align=align, activation=silu_and_mul
        )
        torch.testing.assert_close(few, got[:5], rtol=1e-3, atol=1e-3)
    """)


def test_words_are_multiplied_as_what_they_stand_for(run):
    run("""
        x = torch.randn(M, D).half()
        codes = torch.randint(-8, 8, (E, F, D))
        words = ((codes + 8).view(E, F, D // 8, 8) << (4 * torch.arange(8))).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        for group in (32, 128):
            scale = torch.randint(2, 9, (E, D // group, F)).bfloat16() / 4  # q s is exact
            served = (codes * scale.transpose(1, 2).float().repeat_interleave(group, -1)).bfloat16().half()
            mixed = ops.interleaved(words)
            found = dict(zip(("copies", "experts", "end"), align(ids, 16, E)))
            options = dict(top=k, number=M * k, height=16, out_dtype=torch.float16)
            got = own.product(x, mixed, scale, **found, **options)
            want = own.product(x, served, None, **found, **options)
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    """)


def test_words_of_floats_have_a_factor_for_each_output(run):
    run("""
        x = torch.randn(M, D).half()
        codes = torch.randint(0, 16, (E, F, D))
        packed = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        scale = (torch.rand(E, F, D // 16) * 4).to(torch.float8_e4m3fn)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        served = torch.cat([values, -values])[codes] * scale.float().repeat_interleave(16, -1)
        factor = torch.rand(E, F) / 10
        found = dict(zip(("copies", "experts", "end"), align(ids, 16, E)))
        options = dict(factor=factor, top=k, number=M * k, height=16, out_dtype=torch.float16)
        words = ops.interleaved(packed.view(torch.int32), floats=True)
        got = own.product(x, words, scale.view(torch.int32).transpose(1, 2).contiguous(), **found, **options)
        assert torch.equal(got, own.product(x, served.half(), None, **found, **options))
        first = (x[0].float() @ served[ids[0, 0]].t()) * factor[ids[0, 0]]
        torch.testing.assert_close(got[0].float(), first, rtol=2e-3, atol=2e-3)
    """)


def test_int8_codes_are_summed_exactly_and_rescaled_weight_first(run):
    run("""
        x, w = torch.randint(-127, 128, (M, D)).to(torch.int8), torch.randint(-128, 128, (E, F, D)).to(torch.int8)
        s_x, s_w = torch.rand(M, 1) * 0.01, torch.rand(E, F, 1) * 0.01
        found = dict(zip(("copies", "experts", "end"), align(ids, 16, E)))
        got = own.product(x, w, s_w, **found, top=k, number=M * k, height=16, x_scale=s_x, out_dtype=torch.float32)
        for m in range(M):
            for j in range(k):
                e = ids[m, j]
                acc = (w[e].int() @ x[m].int()).float()
                assert torch.equal(got[m * k + j], s_x[m] * (s_w[e, :, 0] * acc))
    """)


def test_the_router_chooses_the_first_of_equal_logits_and_weighs_in_float64(run):
    run("""
        z = torch.randn(50, 100)
        z[:, 60], z[:, 7] = z[:, 3], z.amax(1)
        values, order = torch.sort(z, dim=1, descending=True, stable=True)
        for among_chosen in (True, False):
            weights, ids = own.choose(z, 5, among_chosen)
            assert torch.equal(ids.long(), order[:, :5])
            among = values[:, :5] if among_chosen else z
            want = (values[:, :5].double() - among.double().logsumexp(1, keepdim=True)).exp().float()
            assert torch.equal(weights, want)
        x, w = torch.randn(9, 64).bfloat16(), torch.randn(8, 64).bfloat16()
        logits = own.router_logits(x, w)
        assert logits.dtype == torch.float32
        assert torch.equal(logits[:1], own.router_logits(x[:1], w))

        from qarl_bridge.engine.units import in_units
        from qarl_jax.models import moe
        from qarl_jax.quant import resolve

        x[:, 3] *= 300
        mine = moe.arithmetic(resolve("cuda"))[0](x.float().numpy(), w.float().numpy())
        assert own.router_logits(x, w).numpy().tolist() == mine.tolist()
        assert torch.equal(own._rounded(x, 24), in_units(x, 24))
    """)


def test_every_kind_of_product_is_one_chain_of_tensor_core_instructions_on_a_hopper_gpu():
    """Compiled for one without one: the accumulator goes from instruction to instruction and is never added outside."""
    run_compiled = """
        import triton, triton.language as tl
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from qarl_bridge.engine.cuda import expert_ops as own

        kernel = own._grouped
        names = dict(copies_ptr="*i32", experts_ptr="*i32", end_ptr="*i32", s_x_ptr="*fp32", f_ptr="*fp32",
                     y_ptr="*bf16", COPIES="i32", N="i32", K="i32")
        words, scales = "tensordesc<i32[64, 16]>", "tensordesc<bf16[1, 64]>"
        floats = "tensordesc<i32[2, 64]>"
        for x, w, s, kind, total, int4, core in (
            ("*bf16", "tensordesc<bf16[64, 128]>", "*fp32", tl.bfloat16, tl.float32, False, "f32.bf16.bf16"),
            ("*bf16", words, scales, tl.bfloat16, tl.float32, True, "f32.bf16.bf16"),
            ("*bf16", words, floats, tl.bfloat16, tl.float32, True, "f32.bf16.bf16"),
            ("*fp8e4nv", "tensordesc<fp8e4nv[64, 128]>", "*fp32", tl.float16, tl.float32, False, "f32.f16.f16"),
            ("*i8", "tensordesc<i8[64, 128]>", "*fp32", tl.int8, tl.int32, False, "s32.s8.s8"),
        ):
            group = 64 if s == floats else 128
            static = dict(TOP=8, INT4=int4, SCALED=False, FACTOR=s == floats, GROUP=group, AS=kind, SUM=total)
            static |= dict(BM=16, BN=64, BK=128)
            signature = dict(x_ptr=x, w=w, s=s, **names) | dict.fromkeys(static, "constexpr")
            values = {(kernel.arg_names.index(name),): value for name, value in static.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values)
            options = dict(num_warps=4, num_stages=3)
            ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
            assert f"wgmma.mma_async.sync.aligned.m64n16k{32 if total == tl.int32 else 16}.{core}" in ptx, kind
            assert "add.f32" not in ptx and "add.rn.f32" not in ptx, kind
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(run_compiled)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
