# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: weights with zero points on CUDA, under Triton's interpreter on a CPU, their assembly included."""

import subprocess
import sys
import textwrap

import pytest

from tests.reference.forks import ASSEMBLED, INTERPRETED, forks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
# Codes, zero points and scales of every kind, and the float32 weight that a formula gives.
MADE = """
from qarl_bridge.engine.cuda import asym_ops as own, ops
FLOAT = tl.float32

def packed(codes, width):
    lanes = codes.view(len(codes), -1, 8 // width) << width * torch.arange(8 // width)
    return lanes.sum(-1).to(torch.uint8)

def made(n, k, bits, group, middle=0):
    torch.manual_seed(n + k + bits + group)
    codes = torch.randint(0, 2**bits, (n, k))
    zeros = torch.randint(0, 256, (n, k // group))
    scales = torch.randint(1, 127, (n, k // group)).to(torch.uint8).view(torch.float8_e4m3fn)
    steps = 2.0 ** -torch.randint(3, 12, (n,))
    planes = {3: ((codes >> 1, 2), (codes & 1, 1))}.get(bits, ((codes, bits),))
    words = [own.interleaved(packed(*plane), plane[1]) for plane in planes] + [None]
    levels = own.levels_of(scales, zeros.to(torch.uint8), k)
    held = own.Words(words[0], words[1], levels, steps.bfloat16(), bits, group, middle)
    places = (codes << 8 - bits) + middle - zeros.repeat_interleave(group, 1)
    return held, (places * (scales.float() * steps[:, None]).repeat_interleave(group, 1)).bfloat16().float()
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a program in a process of its own."""
    with forks(INTERPRETED + ASSEMBLED + MADE, tmp_path_factory.mktemp("programs")) as forked:
        yield forked


@pytest.mark.parametrize(("bits", "middle"), [(2, 0), (2, 32), (3, 0), (4, 0), (4, 8), (8, 0)])
def test_words_are_decoded_to_what_they_stand_for(run, bits, middle):
    run(f"""
        for group in (16, 32, 64, 128, 256):
            words, want = made(72, 512, {bits}, group, {middle})
            assert words.outputs == 72 and words.inputs == 512
            assert torch.equal(words.decoded().float(), want), group
            held = sum(x.numel() * x.element_size() for x in (words.codes, words.low, words.levels) if x is not None)
            assert held == 72 * 512 * {bits} // 8 + 72 * 2 * 512 // min(group, 128)
    """)


@pytest.mark.parametrize(("bits", "middle"), [(2, 32), (3, 16), (4, 8), (8, 0)])
def test_every_code_with_every_zero_point_and_scale_is_rounded_once(run, bits, middle):
    run(f"""
        bits, middle, group = {bits}, {middle}, {16 if bits < 8 else 256}
        scales = torch.arange(0, 127, 1 if bits < 8 else 15).to(torch.uint8)
        scales = torch.cat([scales, scales.new_zeros(-len(scales) % 8)]).view(torch.float8_e4m3fn).expand(256, -1)
        codes = (torch.arange(group) % 2**bits).repeat(256, scales.shape[1])
        zeros = torch.arange(256)[:, None].expand(scales.shape)
        steps = torch.tensor([2.0**-15, 1.3671875, 2.0**-100, 2.0**100]).bfloat16().repeat(64)
        planes = {{3: ((codes >> 1, 2), (codes & 1, 1))}}.get(bits, ((codes, bits),))
        words = [own.interleaved(packed(*plane), plane[1]) for plane in planes] + [None]
        levels = own.levels_of(scales.contiguous(), zeros.to(torch.uint8), codes.shape[1])
        held = own.Words(words[0], words[1], levels, steps, bits, group, middle)
        places = (codes << 8 - bits) + middle - zeros.repeat_interleave(group, 1)
        factors = (scales.float() * steps[:, None].float()).bfloat16().float()
        assert torch.equal(held.decoded(), (places * factors.repeat_interleave(group, 1)).bfloat16())
    """)


def test_products_in_parts_and_blocks_of_any_size_are_of_what_words_stand_for(run):
    run("""
        m, n, k = 70, 192, 1536
        x = torch.randn(m, k)
        for bits, group in ((2, 32), (3, 64)):
            words, weight = made(n, k, bits, group)
            want = x.double() @ weight.double().t()
            bound = 1e-6 * (x.abs() @ weight.abs().t())
            for tile in ((16, 64, 256, 4, 2), (32, 64, 128, 4, 2), (128, 128, 128, 8, 2)):
                for split in (False, True):
                    found = ops.product(x, words, splits=2, split=split, tile=tile, out_dtype=torch.float32)
                    assert ((found - want).abs() <= bound).all(), (tile, split)
            assert own.tile_of(1, k, bits, 2)[2] == 256 and own.tile_of(1, 1280, bits, 2)[2] == 128
            bias = torch.randn(n).bfloat16()
            found = ops.product(x[3:4], words, bias=bias, out_dtype=torch.float32)
            assert ((found - want[3:4] - bias.double()).abs() <= bound[3:4]).all()
    """)


def test_activations_are_rounded_as_on_a_cpu(run):
    run("""
        from qarl_bridge.engine import asym_layers
        from tests.reference import quant_reference

        for k, groups in ((512, (16, 32, 64, 128)), (384, (32, 384))):
            for dtype in (torch.bfloat16, torch.float32):
                x = torch.from_numpy(quant_reference.adversarial_rows(k)).to(dtype)
                for bits in (2, 4):
                    for group in groups:
                        found = own.rounded_rows(x, bits, group)
                        want = asym_layers.rounded_rows(x, bits, group)
                        assert found.dtype == dtype and found[-2:, 7].isnan().all()
                        assert torch.equal(found[:-2].float().view(torch.int32), want[:-2].float().view(torch.int32))
    """)


COMPILED = """
        import re
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from qarl_bridge.engine.cuda import asym_ops, ops
"""


def compiled(program):
    """Runs a program that compiles kernels for a Hopper GPU, without one."""
    program = textwrap.dedent(COMPILED) + textwrap.dedent(program)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_activations_are_divided_correctly_rounded_and_read_sixteen_bytes_at_a_time():
    compiled("""
        kernel = asym_ops._round
        for group, inputs, warps in ((32, 4096, 16), (128, 12288, 32)):
            groups = triton.next_power_of_2(inputs // group)
            static = dict(K=inputs, TOP=3.0, GROUP=group, GROUPS=groups, WIDTH=group)
            signature = dict(x_ptr="*bf16", y_ptr="*bf16") | dict.fromkeys(static, "constexpr")
            values = {(kernel.arg_names.index(name),): value for name, value in static.items()}
            aligned = {(place,): [["tt.divisibility", 16]] for place in (0, 1)}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=warps))
            ptx = made.asm["ptx"]
            assert set(re.findall(r"div[.][a-z.0-9]+", ptx)) == {"div.rn.f32"}
            assert "fma" not in ptx and "ld.global.v4.b32" in ptx
    """)


def test_every_width_is_one_chain_of_tensor_core_instructions_on_a_hopper_gpu():
    """Compiled for one without one: decoded in registers, no weight goes through shared memory, no sum outside."""
    compiled("""
        kernel = ops._product
        for bits, group, (bm, bn, bk, warps, stages), scales in (
            (2, 32, (16, 64, 256, 4, 5), None), (2, 128, (128, 128, 128, 8, 3), None),
            (3, 64, (16, 64, 256, 4, 5), None), (4, 16, (32, 64, 256, 4, 4), None), (8, 32, (16, 64, 128, 4, 5), None),
            (4, 64, (16, 64, 256, 4, 3), "i32"), (4, 128, (16, 64, 256, 4, 3), "bf16"),
            (4, 32, (64, 64, 128, 4, 4), "bf16"),  # without zero points: of floats and of integers
        ):
            blocks, groups = bk // 128, max(1, 128 // group)
            tile = lambda words: f"tensordesc<i32[{blocks}, {bn}, {words}]>"
            levels = f"tensordesc<{'i16' if groups == 1 else 'i32'}[{blocks * max(1, groups // 2)}, {bn}]>"
            levels = levels if scales is None else f"tensordesc<{scales}[{bk // group}, {bn}]>"
            names = dict(x=f"tensordesc<bf16[{bm}, {bk}]>", w=tile(8 if bits == 3 else 4 * bits), s=levels,
                         y_ptr="*bf16", partial_ptr="*fp32", done_ptr="*i32", M="i32", N="i32", K="i32")
            static = dict(PARTS=1, BITS=bits, GROUP=group, ZEROS=scales is None, MIDDLE=0, SPLIT=False, FACTOR=False,
                          BIAS=False, ADDED=False, BM=bm, BN=bn, BK=bk, f_ptr=None, b_ptr=None, a_ptr=None)
            (static if scales else names)["t_ptr"] = None if scales else "*bf16"
            (names if bits == 3 else static)["low"] = tile(4) if bits == 3 else None
            signature = names | dict.fromkeys(static, "constexpr")
            values = {(kernel.arg_names.index(name),): value for name, value in static.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values)
            options = dict(num_warps=warps, num_stages=stages)
            made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            ptx, graph = made.asm["ptx"], made.asm["ttgir"]
            assert f"wgmma.mma_async.sync.aligned.m64n{bm}k16.f32.bf16.bf16" in ptx, bits
            assert "add.f32" not in ptx and "add.rn.f32" not in ptx, bits
            loop = graph[graph.index("scf.for") : graph.index("scf.yield")]
            assert "convert_layout" not in loop and "local_store" not in loop, bits
    """)
