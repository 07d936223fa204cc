"""Every launch configuration that the tables can choose, on the GPU, against naive attention.

Compilers have got single block widths and warp counts wrong where others were right, so none is
trusted because its neighbour passes.
"""

from dataclasses import replace

import pytest
import torch

from flash_attention import naive_attention, tiling
from flash_attention.v1 import tables
from tests.flash_attention.parity import assert_within_bound, make_inputs, results, upcast

triton = pytest.importorskip("triton")

pytestmark = pytest.mark.gpu
WIDTHS = [16, 64, 128, 256]


def chain(blocks: tiling.Blocks):
    """A table's entry and every smaller one that a device with less shared memory would get."""
    while blocks is not None:
        yield blocks
        blocks = blocks.smaller()


def fits(run, blocks: tiling.Blocks):
    try:
        return run(blocks)
    except triton.runtime.errors.OutOfResources:
        return None


class Case:
    """One call, causal, with what naive attention says of it."""

    def __init__(self, head_dim: int, dtype: torch.dtype, segmented: bool):
        device, n = torch.device("cuda"), 700
        inputs = make_inputs(1, 2, 1, n, n, head_dim, dtype, device)
        ids = (torch.arange(n, device=device) // 300)[None] if segmented else None
        naive = dict(causal=True, segment_ids=ids)
        self.own = results(naive_attention, *inputs, **naive)
        self.exact = results(naive_attention, *upcast(*inputs), **naive)
        self.q, self.k, self.v, self.do = (t.detach() for t in inputs)
        self.options = dict(
            causal=True, scale=head_dim**-0.5, dropout_p=0.0, seed=None, segment_ids=ids
        )

    def check(self, **got: torch.Tensor) -> None:
        for name, t in got.items():
            assert_within_bound(name, t, self.own[name], self.exact[name])


every_case = pytest.mark.parametrize(
    ("head_dim", "dtype", "segmented"),
    [
        (head_dim, dtype, segmented)
        for head_dim in WIDTHS
        for dtype, segmented in (
            (torch.float16, False),
            (torch.bfloat16, False),
            (torch.bfloat16, True),
            (torch.float32, False),
        )
    ],
    ids=str,
)


@every_case
def test_every_configuration_of_v1_s_tables_matches_naive(head_dim, dtype, segmented):
    from flash_attention.v1 import backward, forward

    case = Case(head_dim, dtype, segmented)
    q, k, v, do = case.q, case.k, case.v, case.do
    options = dict(case.options, splits=None)
    size, tried = q.element_size(), 0
    saved = None
    for blocks in chain(tiling.tuned(tables.FORWARD, head_dim, size)):
        done = fits(lambda blocks: forward.forward(q, k, v, blocks=blocks, **options), blocks)
        if done is not None:
            saved, tried = done, tried + 1
            case.check(o=done[0])
    for blocks in chain(tiling.tuned(tables.BACKWARD, head_dim, size)):
        grads = fits(
            lambda blocks: backward.backward(do, q, k, v, *saved, blocks=blocks, **options), blocks
        )
        if grads is not None:
            tried += 1
            case.check(dq=grads[0], dk=grads[1], dv=grads[2])
    assert tried >= 4


def try_all(entry: tiling.Blocks, run, check) -> None:
    """run(blocks) with a table's entry where no tensor map fits (odd strides), with the entry and
    its chain; check(result) of those that fit."""
    ways = [replace(entry, descriptors=False), *chain(entry)]
    tried = []
    for blocks in ways:
        result = fits(run, blocks)
        if result is not None:
            tried.append(blocks)
            check(result)
    # The smallest fits every GPU, and where one fits so do those after it.
    assert tried
    assert tried == ways[-len(tried) :]


@every_case
def test_every_configuration_of_v2_s_tables_matches_naive(head_dim, dtype, segmented):
    from flash_attention.delta import delta
    from flash_attention.v2 import backward, forward
    from flash_attention.v2 import tables as v2_tables

    case = Case(head_dim, dtype, segmented)
    q, k, v, do = case.q, case.k, case.v, case.do
    size, saved = q.element_size(), []

    def check_forward(result):
        saved[:] = result
        case.check(o=result[0])

    try_all(
        tiling.tuned(v2_tables.FORWARD, head_dim, size),
        lambda blocks: forward.forward(q, k, v, blocks=blocks, **case.options),
        check_forward,
    )
    o, m, l = saved
    scaled_do, lse, row_delta = delta(o, do, m, l)
    given = (scaled_do, q, k, v, lse, row_delta)
    try_all(
        tiling.tuned(v2_tables.DK_DV, head_dim, size),
        lambda blocks: backward.dk_dv(*given, blocks=blocks, **case.options),
        lambda result: case.check(dk=result[0], dv=result[1]),
    )
    try_all(
        tiling.tuned(v2_tables.DQ, head_dim, size),
        lambda blocks: backward.dq(*given, blocks=blocks, **case.options),
        lambda result: case.check(dq=result),
    )
