"""How many programs FlashAttention V1's kernels are launched with: no result depends on it."""

import pytest
import torch

from flash_attention import flash_attention_v1, launch
from tests.flash_attention.parity import make_inputs, results

pytest.importorskip("triton")


class Grid:
    """In a kernel's place: keeps the number of programs it is launched with, and runs none."""

    def __getitem__(self, grid):
        (self.programs,) = grid
        return lambda *args, **options: None


@pytest.fixture
def grids(monkeypatch) -> tuple[Grid, Grid]:
    """Forward's and backward's, on a device of 132 processors that takes what an H200 takes."""
    from flash_attention.v1 import backward, forward

    kernels = Grid(), Grid()
    monkeypatch.setattr(forward, "_forward_kernel", kernels[0])
    monkeypatch.setattr(backward, "_backward_kernel", kernels[1])
    monkeypatch.setattr(backward, "delta", lambda o, do, m, l: (do, l, l))
    monkeypatch.setattr(launch, "num_processors", lambda device: 132)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return kernels


@pytest.mark.parametrize(
    ("q_splits", "deterministic", "per_head", "per_kv_head"),
    [
        # 64 blocks of rows and 32 of keys; 16 heads.
        (1, False, 1, 1),
        (3, False, 3, 3),
        (100, False, 64, 32),
        # 8 programs a head are 128 of 132 at a time; backward: one for each block of keys.
        ("auto", False, 8, 32),
        ("auto", True, 8, 1),
        (3, True, 3, 1),
    ],
)
def test_q_splits_programs_share_a_head(grids, q_splits, deterministic, per_head, per_kv_head):
    inputs = make_inputs(2, 8, 4, 1024, 512, 16, torch.float32, torch.device("cpu"))
    knobs = dict(q_splits=q_splits, deterministic=deterministic, block_q=16, block_kv=16)
    results(flash_attention_v1, *inputs, **knobs)
    forward, backward = grids
    assert forward.programs == 16 * per_head
    assert backward.programs == 8 * per_kv_head
