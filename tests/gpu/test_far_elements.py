# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""Elements behind the 2^31st of a tensor, on a GPU: kernels of the engine give there what they give of a row alone. And
products whose parts are computed side by side, in a captured graph."""

import pytest

pytestmark = pytest.mark.gpu
torch = pytest.importorskip("torch")

VOCABULARY = 151_936
ROWS = 14_200  # of 2.16e9 logits, 8.6 GB


def check_rows_alone(rows, vocabulary, inputs, device):
    """Checks that logits, log-probs, draws and temperatures of the last rows are those of a batch of them alone."""
    from qarl_bridge.engine.cuda import ops, sampling

    x, w = (torch.randn(count, inputs, device=device).bfloat16() for count in (rows, vocabulary))
    tokens, seeds = torch.randint(0, vocabulary, (rows, 2), device=device), torch.arange(rows, device=device)
    states, draws = torch.zeros(rows, dtype=torch.int32, device=device), seeds.to(torch.int32)
    temperatures = torch.full((1,), 0.7, device=device)
    logits = lambda x: ops.product(x, w, out_dtype=torch.float32, splits=1)  # noqa: E731
    z, few = logits(x), logits(x[-3:])
    assert few.std() > 1
    assert torch.equal(z[-3:], few)
    wanted = sampling.token_logprobs(few, tokens[-3:])
    assert torch.equal(sampling.token_logprobs(z, tokens)[-3:], wanted)
    p, alone = sampling.log_softmax(z), sampling.log_softmax(few)
    assert torch.equal(p[-3:], alone)
    assert torch.equal(sampling.draw(p, seeds, draws)[-3:], sampling.draw(alone, seeds[-3:], draws[-3:]))
    for each in (z, few):
        sampling.apply_temperature(each, states[: len(each)], temperatures)
    assert torch.equal(z[-3:], few)


def test_rows_of_logits_behind_2_to_the_31_elements_are_those_of_a_small_batch():
    check_rows_alone(ROWS, VOCABULARY, 128, "cuda")


def check_sums(every, ends):
    """Checks the sum over shards in the first and the last `ends` elements, with sums made on a CPU."""
    from qarl_bridge.engine import all_reduce

    y = all_reduce.added(every)
    for part in (slice(None, ends), slice(-ends, None)):
        assert torch.equal(y.flatten()[part].cpu(), all_reduce.added(every.flatten(1)[:, part].cpu()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(2, 1, 8), (4, 3, 1000), (8, 17, 5120), (8, 1, 5120)], ids=str)
def test_sums_over_shards_are_a_cpus(shape, dtype):
    check_sums(torch.randn(shape, device="cuda").to(dtype), shape[1] * shape[2])


def test_shards_that_begin_behind_2_to_the_31_elements_are_added():
    shape = 3, 2**30 + 2**20
    check_sums(torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(), 2**20)


def check_fingerprints(rows, device):
    """Checks the sums of the first and the last rows of bytes with those made on a CPU."""
    from qarl_bridge.protocol import fingerprint
    from qarl_bridge.server import staged_gpu

    size = fingerprint.ROW_BYTES
    buffer = torch.empty(rows * size, dtype=torch.uint8, device=device).random_()
    found = staged_gpu.row_sums(buffer)
    assert found.shape == (rows, 2)
    for part in (slice(None, 3), slice(-3, None)):
        wanted = staged_gpu.row_sums(buffer.view(rows, size)[part].flatten().cpu())
        assert torch.equal(found[part].cpu(), wanted)


@pytest.mark.parametrize("rows", [1, 3, 2**21 + 3], ids=str)  # the last are 2^31 words and more
def test_fingerprints_are_those_of_a_cpu(rows):
    check_fingerprints(rows, "cuda")


def test_parts_side_by_side_in_a_captured_graph_are_added_at_every_replay():
    """The counters of finished parts are 0 again behind each product, of whatever size."""
    from qarl_bridge.engine.cuda import ops
    from qarl_bridge.protocol import split_k

    k = 4096
    x, w, a = (torch.randn(count, k, device="cuda").bfloat16() for count in (513, 2560, 96))
    assert split_k.splits_of(*w.shape) == 2

    def outputs():
        many = split_k.splits_of_adapter(k)
        found = [(ops.product(x[:rows], w), ops.product(x[:rows], a, splits=many)) for rows in (1, 17, 64, 513, 2)]
        return [y for pair in found for y in pair]

    outputs()  # compiled, and with memory, before a graph is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = outputs()
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert all(torch.equal(y, other) for y, other in zip(found, outputs(), strict=True))
    assert all(y.isfinite().all() and y.std() > 1 for y in found)
