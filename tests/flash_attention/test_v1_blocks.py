"""Every launch configuration that the tables can choose, on the GPU, against naive attention.

Compilers have got single block widths and warp counts wrong where others were right, so none is
trusted because its neighbour passes.
"""

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


@pytest.mark.parametrize(
    ("dtype", "segmented"),
    [
        (torch.float16, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
        (torch.float32, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", WIDTHS)
def test_every_configuration_of_the_tables_matches_naive(head_dim, dtype, segmented):
    from flash_attention.v1 import backward, forward

    device, n = torch.device("cuda"), 700
    q, k, v, do = make_inputs(1, 2, 1, n, n, head_dim, dtype, device)
    ids = (torch.arange(n, device=device) // 300)[None] if segmented else None
    naive = dict(causal=True, segment_ids=ids)
    own = results(naive_attention, q, k, v, do, **naive)
    exact = results(naive_attention, *upcast(q, k, v, do), **naive)
    options = dict(
        causal=True, scale=head_dim**-0.5, dropout_p=0.0, seed=None, segment_ids=ids, splits=None
    )
    q, k, v = (t.detach() for t in (q, k, v))
    size, tried = q.element_size(), 0
    saved = None
    for blocks in chain(tiling.forward_blocks(head_dim, size)):
        done = fits(lambda blocks: forward.forward(q, k, v, blocks=blocks, **options), blocks)
        if done is not None:
            saved, tried = done, tried + 1
            assert_within_bound("o", done[0], own["o"], exact["o"])
    for blocks in chain(tiling.backward_blocks(head_dim, size)):
        grads = fits(
            lambda blocks: backward.backward(do, q, k, v, *saved, blocks=blocks, **options), blocks
        )
        if grads is not None:
            tried += 1
            for name, grad in zip(("dq", "dk", "dv"), grads, strict=True):
                assert_within_bound(name, grad, own[name], exact[name])
    assert tried >= 4
