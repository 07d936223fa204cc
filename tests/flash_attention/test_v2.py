"""What FlashAttention V2's kernels may do in several ways: each gives the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attention import launch, naive_attention
from flash_attention.tiling import Blocks
from tests.flash_attention.parity import make_inputs, results, upcast
from tests.flash_attention.watch import Guard

pytest.importorskip("triton")

OPTIONS = dict(causal=True, scale=0.25, dropout_p=0.0, seed=None, segment_ids=None)
TINY = Blocks(16, 16)
WAYS = {
    "pointers": dict(descriptors=False),
    "heads in twos, one left": dict(heads_at_a_time=2),
}


def forward_and_backward(q, k, v, do, blocks: Blocks, deterministic: bool) -> dict[str, Tensor]:
    from flash_attention.v2 import backward, forward

    q, k, v = (t.detach() for t in (q, k, v))
    o, m, l = forward.forward(q, k, v, blocks=blocks, **OPTIONS)
    dq, dk, dv = backward.backward(
        do, q, k, v, o, m, l,
        deterministic=deterministic, blocks=blocks, fit_pass=lambda run: run(blocks), **OPTIONS,
    )  # fmt: skip
    return dict(o=o, dq=dq, dk=dk, dv=dv)


@pytest.mark.parametrize(
    "device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_loading_and_of_ordering_gives_the_same_numbers(way, device):
    """3 heads, and blocks of rows and of keys that end within a tile, in memory full of NaN: every
    block of every head is some program's, and no other is."""
    inputs = make_inputs(1, 3, 3, 20, 25, 24, torch.float32, device)
    assert launch.descriptors_fit(*inputs[:3])
    with Guard() as guard:
        got = forward_and_backward(*inputs, replace(TINY, **WAYS[way]), deterministic=True)
    assert guard.margins_are_untouched()
    want = results(naive_attention, *upcast(*inputs), causal=True, scale=0.25)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [24, 59, 64, 128])
@pytest.mark.parametrize("dq", ["reduce", "atomic"])
def test_both_ways_of_adding_to_dq_give_what_its_own_kernel_gives(dq, head_dim):
    """Rows of 59 float32 numbers are at no multiple of 16 bytes: no tensor map adds to them."""
    inputs = make_inputs(2, 4, 2, 300, 333, head_dim, torch.float32, torch.device("cuda"))
    blocks = Blocks(32, 32, dq=dq)
    got = forward_and_backward(*inputs, blocks, deterministic=False)
    want = forward_and_backward(*inputs, blocks, deterministic=True)
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-4)
