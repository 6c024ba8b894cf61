# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""One arithmetic: the engine's own operations on CUDA, under Triton's interpreter on a CPU, where a product adds in
numpy's order; and that they leave an engine alone which they do not serve. What tensor cores do is tests/gpu's."""

import pytest

from tests.reference.forks import ASSEMBLED, INTERPRETED, forks

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs a program in a process of its own."""
    imports = INTERPRETED + "from qarl_bridge.engine.cuda import ops, sampling\n" + ASSEMBLED
    with forks(imports, tmp_path_factory.mktemp("programs")) as forked:
        yield forked


def test_parts_side_by_side_are_parts_one_after_the_other(run):
    run("""
        from qarl_bridge.protocol import split_k

        torch.manual_seed(0)
        # The last two are an adapter's, A and B, whose tiles are larger than the matrix.
        for m, n, k, splits in ((5, 192, 1280, 2), (70, 128, 384, 1), (6, 8, 1536, 4), (33, 192, 8, 1)):
            # The interpreter has no bfloat16 arithmetic.
            x, w = torch.randn(m, k).half(), torch.randn(n, k).half()
            sums = [x[:, a:b].float() @ w[:, a:b].float().T for a, b in split_k.cuts(k, splits)]
            want = sum(sums[1:], sums[0])
            found = [
                ops.product(x, w, splits=splits, split=split, out_dtype=torch.float32) for split in (False, True)
            ]
            assert torch.equal(*found)
            torch.testing.assert_close(found[0], want, rtol=1e-5, atol=1e-4)
    """)


def test_log_probs_are_float64s_rounded_once(run):
    run("""
        torch.manual_seed(0)
        z = torch.randn(3, 5000) * 5
        z[:, 7] = -torch.inf  # as top-k leaves it
        want = z.double().log_softmax(-1).float()
        assert torch.equal(sampling.log_softmax(z), want)
        tokens = torch.tensor([[0, 4999], [1, 2], [3, 4]])
        assert torch.equal(sampling.token_logprobs(z, tokens), want.gather(1, tokens))

        # Tokens that are all but certain: no order of the sum moves the last bit of log-probs of 1e-4 to 1e-14.
        z = torch.randn(64, 5000)
        z[:, 11] += torch.linspace(15, 40, 64)
        z[5, 12] = z[5, 11]  # two largest
        first = torch.full((64, 1), 11)
        got = sampling.token_logprobs(z, first)
        others = z.double() - z.double().amax(-1, keepdim=True)
        rest = others.exp().masked_fill(torch.arange(5000) == 11, 0).sum(-1, keepdim=True)
        assert torch.equal(got, -rest.log1p().float())
        mixed = torch.randperm(5000)
        assert torch.equal(sampling.token_logprobs(z[:, mixed], (mixed == 11).nonzero().expand(64, 1)), got)
        assert torch.equal(sampling.log_softmax(z).gather(1, first), got)
    """)


def test_no_order_of_the_vocabulary_changes_a_log_prob(run):
    run("""
        import numpy as np
        from qarl_bridge.engine.cpu import layers
        from qarl_jax.models.logprobs import statistics
        from qarl_jax.quant import resolve
        from tests.reference.logits import logits_beside_a_midpoint

        z, order = logits_beside_a_midpoint(300, 5000), np.append(0, 5000 - np.arange(1, 5000))
        mine = np.asarray(statistics(z, np.zeros(300, np.int32), numerics=resolve("cpu"))[0])
        z, mixed = torch.from_numpy(z), torch.from_numpy(z[:, order])
        first = torch.zeros(300, 1, dtype=torch.int64)
        assert torch.equal(sampling.token_logprobs(mixed, first), sampling.token_logprobs(z, first))
        theirs = layers.log_softmax(z)[:, 0]
        assert torch.equal(layers.log_softmax(mixed)[:, 0], theirs)
        assert (mine != theirs.numpy()).mean() <= 0.05  # torch's exponential and logarithm have other last bits
    """)


def test_a_draw_is_a_function_of_its_seed_and_number_and_follows_the_distribution(run):
    run("""
        torch.manual_seed(0)
        z = torch.randn(3, 9000)  # of two blocks
        z[:, 7:8200] = -torch.inf  # as top-k leaves it
        logprobs = z.log_softmax(-1)
        seeds, draws = torch.tensor([5, -6, 5]), torch.tensor([0, 3, 9], dtype=torch.int32)
        together = sampling.draw(logprobs, seeds, draws)
        for row in (2, 0, 1):
            one = slice(row, row + 1)
            assert torch.equal(sampling.draw(logprobs[one], seeds[one], draws[one]), together[one])

        few = torch.tensor([0.5, 0.3, 0.0, 0.199, 0.001]).log()
        for over_seeds in (True, False):
            n = torch.arange(200)
            seeds, draws = (n * 2**33 if over_seeds else n * 0), (n * 0 if over_seeds else n)
            drawn = sampling.draw(few.expand(200, 5).contiguous(), seeds, draws.int())
            counts = torch.bincount(drawn, minlength=5).double()
            expected = 200 * few.double().exp()
            assert counts[2] == 0
            kept = expected > 0
            chi = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
            assert chi < 16.3, (counts, chi)  # one in a thousand, of three degrees of freedom
    """)


def test_interleaved_words_are_decoded_to_what_they_stand_for(run):
    run("""
        codes = torch.randint(-8, 8, (2, 72, 512))
        words = ((codes + 8).view(2, 72, 64, 8) << (4 * torch.arange(8))).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
        mixed = ops.interleaved(words)
        assert torch.equal(mixed[1], ops.interleaved(words[1]))
        low = (mixed[0, 1, 5, 4 * 2 + 2 * 1 + 1] >> 4 * torch.arange(8)) & 15
        assert (low.view(2, 4).t() - 8).tolist() == codes[0, 5, 128 + 64 + 8 + 4 :].unfold(0, 2, 16)[:4].tolist()
        for group in (16, 32, 64, 128, 256, 512):
            scale = torch.randint(2, 9, (512 // group, 72)).bfloat16() / 4  # q s is exact
            want = codes[0] * scale.t().float().repeat_interleave(group, 1)
            assert torch.equal(ops.dequantized(mixed[0], scale).float(), want)
    """)


def test_every_code_with_every_scale_is_rounded_once(run):
    run("""
        FLOAT = tl.float32
        bits = torch.arange(128, 127 + 121 << 7).view(128, 247)  # of normal bfloat16 below 2^121
        scale = bits.to(torch.int16).view(torch.bfloat16)
        codes = (torch.arange(16).repeat(128) + torch.arange(247)[:, None]) % 16 - 8
        words = ((codes + 8).view(247, 256, 8) << (4 * torch.arange(8))).sum(-1).to(torch.int32)
        want = (codes * scale.t().float().repeat_interleave(16, 1)).bfloat16()
        found = ops.dequantized(ops.interleaved(words), scale)
        assert torch.equal(found, want)
        few = torch.cat([scale[::9], -scale[::9]])[: 2048 // 128]  # a scale for 128 inputs
        want = (codes * few.t().float().repeat_interleave(128, 1)).bfloat16()
        found = ops.dequantized(ops.interleaved(words), few.contiguous())
        assert torch.equal(found.view(torch.int16), want.view(torch.int16))
    """)


def test_words_of_floats_are_decoded_to_what_they_stand_for(run):
    run("""
        # Every code with every scale that is not negative; a row's groups each have all codes.
        rows = torch.arange(128)[:, None]
        codes = (rows + torch.arange(512)) % 16
        scale = ((rows + torch.arange(32)) % 127).to(torch.uint8).view(torch.float8_e4m3fn)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        want = torch.cat([values, -values])[codes] * scale.float().repeat_interleave(16, 1)
        words = ops.interleaved(packed.view(torch.int32), floats=True)
        found = ops.dequantized(words, scale.view(torch.int32).t().contiguous()).float()
        assert torch.equal(found, want) and torch.equal(found.signbit(), want.signbit())
    """)


def test_a_factor_meets_the_sum_which_is_rounded_before_the_bias(run):
    run("""
        torch.manual_seed(0)
        m, n, k = 5, 192, 1280
        x, w = torch.randint(-4, 5, (m, k)).half(), torch.randint(-4, 5, (n, k)).half()  # exact sums
        factor, bias = torch.rand(n) / 100, torch.randn(n).half()
        sums = (x.float() @ w.float().t()) * factor
        for split in (False, True):
            options = {"factor": factor, "splits": 2, "split": split, "out_dtype": torch.float16}
            assert torch.equal(ops.product(x, w, **options), sums.half())
            assert torch.equal(ops.product(x, w, bias=bias, **options), (sums.half().float() + bias.float()).half())
    """)


def test_an_addend_meets_the_rounded_product(run):
    run("""
        x, w = torch.randn(5, 1536).bfloat16(), torch.randn(40, 1536).bfloat16()
        x[3] = 0
        y = torch.where(torch.arange(40) < 8, -0.0, torch.randn(5, 40)).bfloat16()
        for splits in (1, 3):
            d = ops.product(x, w, splits=splits)
            found = ops.product(x, w, splits=splits, added=y)
            assert torch.equal(found.view(torch.int16), (y - (0.0 - d)).view(torch.int16))
            assert torch.equal(found[3].view(torch.int16), y[3].view(torch.int16))
    """)


def test_words_in_parts_and_blocks_of_any_size_are_multiplied_as_what_they_stand_for(run):
    run("""
        m, n, k = 20, 128, 2048  # several blocks of the smallest tile, less than one of the largest
        x, packed = torch.randn(m, k).half(), torch.randint(-(2**31), 2**31 - 1, (n, k // 8)).int()
        # Of floats' words four scales are one: 64 inputs.
        for group, floats in ((32, False), (128, False), (256, False), (1024, False), (64, True)):
            mixed = ops.interleaved(packed, floats=floats)
            scale = torch.randint(2, 9, (k // group, n)).bfloat16() / 4
            if floats:
                scale = torch.randint(40, 80, (k // group, n, 4)).to(torch.uint8).view(torch.int32).squeeze(-1)
            want = x.float() @ ops.dequantized(mixed, scale).float().t()
            options = {"splits": 2, "out_dtype": torch.float32}
            for tile in ((16, 64, 256, 4, 2), (128, 64, 512, 4, 2), None):
                found = [ops.product(x, mixed, scale, split=split, tile=tile, **options) for split in (False, True)]
                assert torch.equal(*found)
                torch.testing.assert_close(found[0], want, rtol=1e-5, atol=1e-2)
    """)


def test_inputs_multiplied_at_a_time_are_of_one_part_and_of_whole_groups(run):
    run("""
        n = 64
        for k, group, splits, inputs in (
            (2048, 128, 2, 256), (1024, 1024, 1, 256), (1280, 32, 2, 128), (1280, 1280, 1, 256), (1536, 384, 2, 128),
            (896, 896, 1, 128),
        ):
            assert ops._tile(8, n, k, 4, splits, group)[2] == inputs, (k, group)
            packed = torch.randint(-(2**31), 2**31 - 1, (n, k // 8)).int()
            x, mixed, scale = torch.randn(8, k).half(), ops.interleaved(packed), torch.rand(k // group, n).bfloat16()
            found = ops.product(x, mixed, scale, splits=splits, out_dtype=torch.float32)
            want = x.float() @ ops.dequantized(mixed, scale).float().t()
            torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-2)
    """)


def test_shards_are_added_by_rank_and_rounded_once(run):
    run("""
        torch.manual_seed(0)
        for shape in ((4, 3, 1000), (2, 1, 8), (4, 0, 8)):
            # The interpreter has no bfloat16 arithmetic.
            every = torch.randn(shape).half() * torch.tensor([1.0, 64.0, 1e-3, 8.0])[: shape[0], None, None].half()
            total = every[0].float()
            for own in every[1:]:
                total = total + own.float()
            assert torch.equal(ops.sum_of_shards(every), total.half())
            wide = every.float() * 1.1
            assert torch.equal(ops.sum_of_shards(wide), sum(wide[1:], wide[0]))
    """)


def test_shards_that_begin_behind_two_to_the_31_elements_are_found(run):
    """As 8 shards of 65,536 tokens and 5,120 hidden sizes have them. Memory of which most is never touched."""
    run("""
        size = 2**30 + 2**20
        every = torch.empty(3, size, dtype=torch.float16)
        every[:, :1024] = torch.tensor([1.0, 2.0, 4.0]).half()[:, None]
        y = torch.empty(1024, dtype=torch.float16)
        ops._sum_shards[(1,)](every, y, size, SHARDS=3, BLOCK=1024)
        assert (y == 7).all()
    """)


# The interpreter knows none of CUDA's library, and does not round to bfloat16.
LIBRARY = """
        import types
        from qarl_bridge.engine.cuda import norm_ops

        def rint(x):
            return tl.tensor(interpreter.TensorHandle(np.rint(x.handle.data), x.dtype), x.type)

        norm_ops.libdevice = types.SimpleNamespace(rint=rint)

        def check_codes(y, codes):
            top = y.float().abs().amax(-1, keepdim=True)
            inverse = torch.where(top == 0, 0, 127 / top)
            assert torch.equal(codes[0].float(), torch.round(y.float() * inverse)) and codes[0].abs().max() == 127
            assert torch.equal(codes[1], top / 127)
"""


def test_norms_write_the_codes_of_what_they_return(run):
    run(
        LIBRARY
        + """
        torch.manual_seed(0)
        x, r, w = torch.randn(5, 72).half(), torch.randn(5, 72).half(), torch.randn(72).half()
        x[3], r[3] = 0, 0
        total = (x.float() + r.float()).half()
        codes = norm_ops.room_for_codes(x)
        y, kept = norm_ops.rms_norm(x, w, 1e-6, r.clone(), codes)
        want, _ = norm_ops.rms_norm(x, w, 1e-6, r.clone())
        assert torch.equal(kept, total) and torch.equal(y, want)
        scale = (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt().float()
        assert torch.equal(y, (total.float() * scale * w.float()).half())
        check_codes(y, codes)
    """
    )


def test_inverse_roots_are_the_learners_where_a_float64_sum_would_depend_on_its_order(run):
    """Results lie beside a midpoint of two float32 numbers, where the last digits of eps, sum and root show."""
    run(
        LIBRARY
        + """
        from qarl_bridge.engine.cpu import layers as cpu
        from qarl_jax.models import layers
        from tests.reference.norms import rows_beside_a_midpoint

        for width in (72, 128):
            x, roots = rows_beside_a_midpoint(300, width, 1e-6)
            np.testing.assert_array_equal(layers.inverse_rms(x, 1e-6, order="float64")[:, 0], roots)
            for order in (slice(None), slice(None, None, -1)):
                rows = torch.from_numpy(x[:, order].copy())
                for ops in (norm_ops, cpu):
                    found = ops.rms_norm(rows, torch.ones(width), 1e-6, *[torch.float32] * (ops is cpu)).numpy()
                    np.testing.assert_array_equal(found[:, order], x * roots[:, None])
    """
    )


def test_heads_are_normed_and_rotated_in_one_kernel(run):
    run(
        LIBRARY
        + """
        torch.manual_seed(0)
        fused = torch.randn(7, 8 * 32).half()
        x = fused[:, 32:192]  # three heads of queries and two of keys
        w, positions = torch.randn(2, 32).half(), torch.tensor([0, 1, 2, 3, 90, 5, 4])
        angles = torch.arange(100.0)[:, None] * torch.rand(16)
        table = torch.cat([angles.cos(), angles.sin()], -1).half()
        y = torch.cat([
            norm_ops.rms_norm(x[:, first:end].view(7, -1, 32), g, 1e-6)
            for (first, end), g in zip(((0, 96), (96, 160)), w, strict=True)
        ], 1).float()
        cos, sin = table[positions].float()[:, None].chunk(2, -1)
        a, b = y.chunk(2, -1)
        want = torch.cat([a * cos - b * sin, b * cos + a * sin], -1).half().view(7, 160)
        assert torch.equal(norm_ops.rotated_norms(x, 3, (w[0], w[1]), 1e-6, positions, table), want)
    """
    )
