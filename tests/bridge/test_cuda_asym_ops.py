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
        m, n, k = 20, 192, 1024  # several blocks of the smallest tile, less than one of the largest
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

        half, full = torch.bfloat16, torch.float32
        for k, group, dtype, bits in (
            (512, 16, half, 2), (512, 32, full, 2), (512, 64, half, 4), (512, 128, full, 4),
            (384, 32, half, 4), (384, 384, half, 2),
        ):
            rows = quant_reference.adversarial_rows(k)
            x = torch.from_numpy(np.concatenate([rows[:18], rows[-2:]])).to(dtype)  # those between are like the last
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


# Compiles the product of a weight with zero points, or of int4 codes ("bf16" scales), or of e2m1 codes ("i32").
PRODUCT = """
        kernel = ops._product

        def product(bits, group, tile, scales=None, parts=1, split=False):
            (bm, bn, bk, warps, stages), zeros = tile, scales is None
            blocks, groups = bk // 128, max(1, 128 // group)
            words = lambda count: f"tensordesc<i32[{blocks}, {bn}, {count}]>"
            levels = f"tensordesc<{'i16' if groups == 1 else 'i32'}[{blocks * max(1, groups // 2)}, {bn}]>"
            levels = levels if zeros else f"tensordesc<{scales}[{bk // group}, {bn}]>"
            names = dict(x=f"tensordesc<bf16[{bm}, {bk}]>", w=words(8 if bits == 3 else 4 * bits), s=levels,
                         y_ptr="*bf16", partial_ptr="*fp32", done_ptr="*i32", M="i32", N="i32", K="i32")
            static = dict(PARTS=parts, BITS=bits, GROUP=group, ZEROS=zeros, MIDDLE=0, SPLIT=split, FACTOR=False,
                          BIAS=False, ADDED=False, BM=bm, BN=bn, BK=bk, f_ptr=None, b_ptr=None, a_ptr=None)
            (names if zeros else static)["t_ptr"] = "*bf16" if zeros else None
            (names if bits == 3 else static)["low"] = words(4) if bits == 3 else None
            signature = names | dict.fromkeys(static, "constexpr")
            values = {(kernel.arg_names.index(name),): value for name, value in static.items()}
            aligned = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in names
                       if name.endswith("_ptr") or name in ("N", "K")}
            source = ASTSource(fn=kernel, signature=signature, constexprs=values, attrs=aligned)
            options = dict(num_warps=warps, num_stages=stages)
            return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
"""


def test_every_width_is_one_chain_of_tensor_core_instructions_on_a_hopper_gpu():
    """Compiled for one without one: decoded in registers, no weight goes through shared memory, no sum outside."""
    compiled(f"""{PRODUCT}
        for bits, group, tile, scales in (
            (2, 32, (16, 64, 256, 4, 5), None), (2, 128, (128, 128, 128, 8, 3), None),
            (3, 64, (16, 64, 256, 4, 5), None), (4, 16, (32, 64, 256, 4, 4), None), (8, 32, (16, 64, 128, 4, 5), None),
            (4, 64, (16, 64, 256, 4, 3), "i32"), (4, 128, (16, 64, 256, 4, 3), "bf16"),
            (4, 32, (64, 64, 128, 4, 4), "bf16"),
        ):
            made = product(bits, group, tile, scales)
            ptx, graph = made.asm["ptx"], made.asm["ttgir"]
            assert f"wgmma.mma_async.sync.aligned.m64n{{tile[0]}}k16.f32.bf16.bf16" in ptx, bits
            assert "add.f32" not in ptx and "add.rn.f32" not in ptx, bits
            loop = graph[graph.index("scf.for") : graph.index("scf.yield")]
            assert "convert_layout" not in loop and "local_store" not in loop, bits
    """)


@pytest.mark.nightly
def test_tiles_keep_all_they_hold_in_registers():
    """Two parts: in parallel, and one after the other, which needs the sums of both."""
    compiled(f"""{PRODUCT}
        import os, subprocess, tempfile

        words = sorted(set(sum(ops._INT4_TILES.values(), ())))
        for bits, scales, tile, splits in (
            (2, None, asym_ops._TILES[256], (True, False)), (3, None, asym_ops._TILES[256], (True, False)),
            (3, None, asym_ops._TILES[512], (False,)), (4, "i32", ops._INT4_TILES[512][0], (False,)),
            *((4, scales, tile, (True,)) for scales in ("bf16", "i32") for tile in words),
        ):
            for split in splits:
                made = product(bits, 64 if scales == "i32" else 32, tile, scales, 2, split)
                with tempfile.TemporaryDirectory() as folder:
                    path = os.path.join(folder, "product.cubin")
                    with open(path, "wb") as file:
                        file.write(made.asm["cubin"])
                    command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", path]
                    used = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                assert "REG:" in used and " STACK:0 " in used and " LOCAL:0 " in used, (bits, scales, tile, split, used)
    """)


def test_two_parts_of_a_large_model_run_in_parallel_at_256_rows(run):
    run("""
        from qarl_bridge.protocol import split_k

        for outputs, inputs in ((5120, 27648), (5120, 5120), (4096, 12288)):
            splits = split_k.splits_of(outputs, inputs)
            rows, width, *_ = own.tile_of(256, inputs, 2, splits)
            assert splits == 2 and ops.side_by_side(splits, 256 // rows * outputs // width, rows * width)
        assert not ops.side_by_side(2, 4 * 40, 128 * 128) and not ops.side_by_side(1, 1, 16 * 64)
        assert not ops.side_by_side(2, 864, 16 * 64)  # more tiles than counters
    """)
