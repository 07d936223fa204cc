"""What FlashAttention V2's kernels may do in several ways: each gives the same numbers."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flash_attention import flash_attention_v2, launch, naive_attention
from flash_attention.tiling import Blocks
from tests.flash_attention.parity import make_inputs, results, upcast
from tests.flash_attention.watch import Guard

triton = pytest.importorskip("triton")

OPTIONS = dict(causal=True, scale=0.25, dropout_p=0.0, seed=None, segment_ids=None)
TINY = Blocks(16, 16)
WAYS = {
    "pointers": dict(descriptors=False),
    "heads in twos, one left": dict(heads_at_a_time=2),
}

kernels = pytest.mark.parametrize(
    "device", ["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)


def forward_and_backward(q, k, v, do, blocks: Blocks) -> dict[str, Tensor]:
    from flash_attention.delta import delta
    from flash_attention.v2 import backward, forward

    q, k, v = (t.detach() for t in (q, k, v))
    o, m, l = forward.forward(q, k, v, blocks=blocks, **OPTIONS)
    scaled_do, lse, row_delta = delta(o, do, m, l)
    given = (scaled_do, q, k, v, lse, row_delta)
    dk, dv = backward.dk_dv(*given, blocks=blocks, **OPTIONS)
    dq = backward.dq(*given, blocks=blocks, **OPTIONS)
    return dict(o=o, dq=dq, dk=dk, dv=dv)


@kernels
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_loading_and_of_ordering_gives_the_same_numbers(way, device):
    """3 heads, and blocks of rows and of keys that end within a tile, in memory full of NaN: every
    block of every head is some program's, and no other is."""
    inputs = make_inputs(1, 3, 3, 20, 25, 24, torch.float32, device)
    assert launch.descriptors_fit(*inputs[:3])
    with Guard() as guard:
        got = forward_and_backward(*inputs, replace(TINY, **WAYS[way]))
    assert guard.margins_are_untouched()
    want = results(naive_attention, *upcast(*inputs), causal=True, scale=0.25)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)


@kernels
@pytest.mark.parametrize("kernel", ["dk_dv", "dq"])
def test_each_kernel_of_backward_is_made_smaller_alone(kernel, device, monkeypatch):
    """One that has room for 16 x 16 alone; the other keeps its table's blocks."""
    from flash_attention.v2 import backward, tables

    monkeypatch.setattr(launch, "_FITTING", {})
    ran = {}

    def watched(name):
        run = getattr(backward, name)

        def inside(*args, blocks, **options):
            rows = blocks.block_q + blocks.block_kv
            if name == kernel and rows > 32:
                raise triton.runtime.errors.OutOfResources(rows, 32, "shared memory")
            ran[name] = blocks.block_q, blocks.block_kv
            return run(*args, blocks=blocks, **options)

        return inside

    for name in ("dk_dv", "dq"):
        monkeypatch.setattr(backward, name, watched(name))
    inputs = make_inputs(1, 1, 1, 40, 40, 16, torch.float32, device)
    got = results(flash_attention_v2, *inputs, causal=True)
    want = results(naive_attention, *upcast(*inputs), causal=True)
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name], rtol=1e-4, atol=1e-5)
    table = dict(dk_dv=tables.DK_DV[64, 4], dq=tables.DQ[64, 4])
    expected = {name: (blocks.block_q, blocks.block_kv) for name, blocks in table.items()}
    assert ran == expected | {kernel: (16, 16)}
