# Copyright 2026 The qarl_jax authors.
# SPDX-License-Identifier: Apache-2.0
"""An elementwise optimizer's update of a large parameter in one pass over memory: a kernel of Pallas' Triton for GPUs.

XLA makes three passes of it: the update is written in float32 because two want it, the new parameters and the norm
of what was added, and parameters that are written beside a sum are copied into their place. That is 26 bytes a
parameter where all is bfloat16; reading gradient, parameter and two moments and writing three of them back is 14.

The kernel has no arithmetic of its own. It traces the optimizer's for a block of elements, so that there is one AdamW
here; only the last bit of a division or a root may be another than XLA's.

Left out: AdamW written out in the kernel. That would save `_split`, and would be a second copy of clipping, decay, the
guard, the norms and the rounding of moments in each dtype, to be held to the first one by tests. XLA alone takes 51 ms
where this takes 37, for 8B parameters on an H200 (docs/operations/performance.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jax.extend.core import Jaxpr, JaxprEqn, Var
from jaxtyping import Array, Float

from qarl_jax.runtime.mesh import on_one_device

BLOCK = 2048
"""Elements of a program: eight to a thread, 16 bytes of bfloat16."""
LEAST = 2**22
"""Elements from which a parameter is worth a kernel."""
_WARPS = 8

Step = Callable[..., tuple[list[Array], list[Float[Array, ""]]]]


def serves(*arrays: Any) -> bool:
    """Whether `run` takes these arrays, all of one shape: large, of whole blocks that 32 bits can number, in float32 or
    bfloat16, and on one device."""
    size = arrays[0].size
    return (
        on_one_device()
        and LEAST <= size < 2**31
        and size % BLOCK == 0
        and all(x.shape == arrays[0].shape and x.dtype in (jnp.float32, jnp.bfloat16) for x in arrays)
    )


def _kernel(*refs: Any, step: Any, scalars: int, stacks: int, reads: int) -> None:
    """`scalars` of shape [1], `stacks` and `reads` [n], then out: `stacks` again and, per sum, [programs]."""
    given, arrays, out = refs[:scalars], refs[scalars : scalars + stacks + reads], refs[scalars + stacks + reads :]
    program = pl.program_id(0)
    first = program * BLOCK
    at = first + jnp.arange(BLOCK, dtype=jnp.int32)
    values = [ref[0] for ref in given]
    blocks = [plgpu.load(ref.at[at]) for ref in arrays]
    new, sums = step(*values, first.astype(jnp.uint32), *blocks)
    for ref, x in zip(out[:stacks], new, strict=True):
        plgpu.store(ref.at[at], x.astype(ref.dtype))
    for ref, x in zip(out[stacks:], sums, strict=True):
        plgpu.store(ref.at[program], x)


def _split(jaxpr: Jaxpr, scalars: int) -> tuple[Jaxpr, Jaxpr, list[int]]:
    """What follows from the first `scalars` arguments and constants alone, and the rest: (scalars) -> known numbers,
    and (known numbers, inverses of some, other arguments) -> results; and which known numbers these some are.

    So a schedule is computed once, and no kernel need know cosines; and a division by what is the same for all elements
    is a product, as XLA has it, too: three of AdamW's four.
    """
    unknown = set(jaxpr.invars[scalars:])
    before, after = [], []
    for eqn in jaxpr.eqns:
        known = not any(isinstance(x, Var) and x in unknown for x in eqn.invars)
        if known and not any(getattr(x.aval, "shape", None) for x in eqn.outvars):
            before.append(eqn)
        else:
            after.append(eqn)
            unknown.update(eqn.outvars)
    used = {x: None for eqn in after for x in eqn.invars if isinstance(x, Var) and x not in unknown}
    used |= {x: None for x in jaxpr.outvars if isinstance(x, Var) and x not in unknown}
    divisors = [x for x in used if any(eqn.primitive is jax.lax.div_p and eqn.invars[1] is x for eqn in after)]
    fresh: Any = jax.make_jaxpr(lambda *xs: xs)(*(x.aval for x in divisors)).jaxpr.invars
    inverse = dict(zip(divisors, fresh, strict=True))

    def as_product(eqn: JaxprEqn) -> JaxprEqn:
        over = eqn.invars[1] if eqn.primitive is jax.lax.div_p else None
        if not (isinstance(over, Var) and over in inverse):
            return eqn
        return eqn.replace(primitive=jax.lax.mul_p, invars=[eqn.invars[0], inverse[over]])

    unnamed = jaxpr.debug_info.with_unknown_names()
    return (
        jaxpr.replace(eqns=before, invars=jaxpr.invars[:scalars], outvars=list(used), debug_info=unnamed),
        jaxpr.replace(
            eqns=[as_product(eqn) for eqn in after],
            constvars=[],
            invars=[*used, *fresh, *jaxpr.invars[scalars:]],
            debug_info=unnamed,
        ),
        [list(used).index(x) for x in divisors],
    )


def run(
    step: Step,
    scalars: Any,
    stacks: Sequence[Array],
    reads: Sequence[Array],
    *,
    interpret: bool = False,
) -> tuple[list[Array], list[Float[Array, ""]]]:
    """`step` for all elements, block by block; the results lie where `stacks` did, if those are donated.

    Args:
      step: (scalars, first, stacks, reads) -> (new stacks, float32 sums), traced for blocks [BLOCK]; first: uint32, the
        position of the block's first element. It may hold constants that are scalars.
      scalars: a tree of them.
      stacks, reads: arrays of one shape that `serves`.
      interpret: without a GPU, step by step (tests).

    Returns:
      The new stacks, and each sum over all blocks.
    """
    leaves, structure = jax.tree.flatten(scalars)
    here, count = len(leaves), len(stacks)

    def flat(*values: Any) -> Any:
        first, arrays = values[here], list(values[here + 1 :])
        return step(jax.tree.unflatten(structure, values[:here]), first, arrays[:count], arrays[count:])

    position = jax.ShapeDtypeStruct((), jnp.uint32)
    blocks = [jax.ShapeDtypeStruct((BLOCK,), x.dtype) for x in (*stacks, *reads)]
    traced, shapes = jax.make_jaxpr(flat, return_shape=True)(*leaves, position, *blocks)
    before, inside, divisors = _split(traced.jaxpr, here)
    known = jax.core.eval_jaxpr(before, traced.consts, *leaves)
    given = [jnp.reshape(x, (1,)) for x in (*known, *(1 / known[i] for i in divisors))]
    tree = jax.tree.structure(shapes)

    def body(*values: Any) -> Any:
        return jax.tree.unflatten(tree, jax.core.eval_jaxpr(inside, (), *values))

    size, sums = stacks[0].size, len(shapes[1])
    programs = size // BLOCK
    arrays = [x.reshape(size) for x in (*stacks, *reads)]
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        functools.partial(_kernel, step=body, scalars=len(given), stacks=count, reads=len(reads)),
        grid=(programs,),
        in_specs=[anywhere] * (len(given) + len(arrays)),
        out_specs=[anywhere] * (count + sums),
        out_shape=[
            *(jax.ShapeDtypeStruct((size,), x.dtype) for x in stacks),
            *(jax.ShapeDtypeStruct((programs,), jnp.float32),) * sums,
        ],
        input_output_aliases={len(given) + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="one_pass_update",
    )(*given, *arrays)
    return [x.reshape(stacks[0].shape) for x in results[:count]], [jnp.sum(x) for x in results[count:]]
