"""Forward and backward take memory that grows with N: nothing in them is N x N."""

import pytest
import torch

from tests.flash_attention.parity import make_inputs, results
from tests.flash_attention.versions import V2
from tests.flash_attention.watch import Largest, enter_inside
from training import memory

OPTIONS = [
    dict(causal=False),
    dict(causal=True, deterministic=True),
    dict(causal=True, segments=True),
    dict(causal=True, dropout_p=0.2),
]


def call(flash, n: int, head_dim: int, device: torch.device, *, segments: bool = False, **options):
    """A forward and backward to run, with its inputs made."""
    inputs = make_inputs(1, 2, 1, n, n, head_dim, torch.float32, device)
    if segments:
        options["segment_ids"] = (torch.arange(n, device=device) // 50)[None]
    return lambda: results(flash, *inputs, **options)


@pytest.mark.v2_interpreted
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_largest_tensor_doubles_with_the_length(
    flash, device, options, interpreted, monkeypatch
):
    """The tiles' size is fixed. Scores or a mask of all pairs would be four times as large, and so
    would be a copy of dQ for each K/V block (FlagAttention#4)."""
    if flash is V2 and device.type == "cpu" and options != OPTIONS[1]:
        pytest.skip("V1 and the GPU have the others")
    n = 16 if interpreted else 64
    largest = []
    for length in (n, 2 * n):
        run = call(flash, length, 8, device, block_q=16, block_kv=16, **options)
        with monkeypatch.context() as patch, Largest() as seen:
            enter_inside(seen, patch)
            run()
        largest.append(seen.bytes)
    assert largest[1] == 2 * largest[0]


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_peak_of_a_gpu_doubles_with_the_length(flash, options):
    device = torch.device("cuda")

    def peak(n: int) -> int:
        run = call(flash, n, 64, device, **options)
        run()  # compiles, and allocates what is allocated once
        memory.reset_peaks(device)
        before = memory.current(device)
        run()
        return memory.peaks(device)["allocated"] - before

    once, twice = peak(4096), peak(8192)
    assert 1.9 * once <= twice <= 2.1 * once
