"""Every launch configuration that the tables can choose, on the GPU, against naive attention.

Compilers have got single block widths and warp counts wrong where others were right, so none is
trusted because its neighbour passes.
"""

from dataclasses import replace

import pytest
import torch

from flash_attention import naive_attention, tiling
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
    for blocks in chain(tiling.forward_blocks(head_dim, size)):
        done = fits(lambda blocks: forward.forward(q, k, v, blocks=blocks, **options), blocks)
        if done is not None:
            saved, tried = done, tried + 1
            case.check(o=done[0])
    for blocks in chain(tiling.backward_blocks(head_dim, size)):
        grads = fits(
            lambda blocks: backward.backward(do, q, k, v, *saved, blocks=blocks, **options), blocks
        )
        if grads is not None:
            tried += 1
            case.check(dq=grads[0], dk=grads[1], dv=grads[2])
    assert tried >= 4


def ways(blocks: tiling.Blocks):
    """The chain, and the table's entry where no tensor map fits (odd strides)."""
    yield from chain(blocks)
    yield replace(blocks, descriptors=False, dq="atomic")


@every_case
def test_every_configuration_of_v2_s_tables_matches_naive(head_dim, dtype, segmented):
    from flash_attention.v2 import backward, forward, tables

    case = Case(head_dim, dtype, segmented)
    q, k, v, do = case.q, case.k, case.v, case.do
    size, tried = q.element_size(), {"forward": 0, "backward": 0, "dq": 0}
    saved = None
    for blocks in ways(tiling.tuned(tables.FORWARD, head_dim, size)):
        done = fits(lambda blocks: forward.forward(q, k, v, blocks=blocks, **case.options), blocks)
        if done is not None:
            saved = done
            tried["forward"] += 1
            case.check(o=done[0])

    def run(blocks, deterministic, fit_pass):
        return backward.backward(
            do, q, k, v, *saved,
            deterministic=deterministic, blocks=blocks, fit_pass=fit_pass, **case.options,
        )  # fmt: skip

    for blocks in ways(tiling.tuned(tables.BACKWARD, head_dim, size)):
        grads = fits(lambda blocks: run(blocks, False, None), blocks)
        if grads is not None:
            tried["backward"] += 1
            case.check(dq=grads[0], dk=grads[1], dv=grads[2])
    # Deterministic: the kernel of dK and dV without dQ, and dQ's own.
    fitting = next(
        blocks
        for blocks in chain(tiling.tuned(tables.BACKWARD, head_dim, size))
        if fits(lambda blocks: run(blocks, True, lambda run_pass: q), blocks) is not None
    )
    for blocks in ways(tiling.tuned(tables.DQ_PASS, head_dim, size)):
        grads = fits(lambda blocks: run(fitting, True, lambda run_pass: run_pass(blocks)), blocks)
        if grads is not None:
            tried["dq"] += 1
            case.check(dq=grads[0], dk=grads[1], dv=grads[2])
    assert min(tried.values()) >= 4, tried
