"""Block sizes: the paper's formula and the heuristic that shares rows among programs."""

import math

import pytest

from flash_attention import gpus, tiling
from flash_attention.v1 import tables


@pytest.mark.parametrize(
    ("elements", "head_dim", "want"),
    [(25_600, 64, (64, 100)), (65_536, 128, (128, 128)), (4_096, 256, (4, 4)), (100, 64, (1, 1))],
)
def test_paper_blocks_follow_section_3_1(elements, head_dim, want):
    assert tiling.paper_blocks(elements, head_dim) == want


@pytest.mark.parametrize("head_dim", range(1, 257))
def test_the_padded_head_dim_is_the_next_power_of_two_of_at_least_16(head_dim):
    padded = tiling.padded_head_dim(head_dim)
    assert padded >= max(head_dim, 16)
    assert math.log2(padded).is_integer()
    assert padded == 16 or padded < 2 * head_dim


def test_one_split_is_enough_where_the_heads_fill_the_device():
    assert tiling.num_splits(programs=132, blocks=64, processors=132) == 1


def test_few_heads_are_split_until_the_device_is_busy():
    # 16 heads on 132 processors: 8 splits give 128 programs, 97% of one wave.
    assert tiling.num_splits(programs=16, blocks=64, processors=132) == 8


@pytest.mark.parametrize("programs", [1, 7, 32, 100, 133, 500])
def test_the_split_is_the_fewest_within_5_percent_of_the_best(programs):
    blocks, processors = 40, 132

    def efficiency(splits: int) -> float:
        return (programs * splits / processors) / math.ceil(programs * splits / processors)

    best = max(efficiency(s) for s in range(1, blocks + 1))
    got = tiling.num_splits(programs, blocks, processors)
    assert efficiency(got) >= 0.95 * best
    assert all(efficiency(s) < 0.95 * best for s in range(1, got))


@pytest.mark.parametrize(
    ("batch_heads", "nq", "per_processor", "splits"),
    # Row blocks of 64. 16 heads: 8 splits are 128 programs of 132 at a time, 16 are 256 of 264. One
    # head of 65 rows has two row blocks.
    [(16, 2048, 1, 8), (16, 2048, 2, 16), (1, 65, 1, 2), (1, 64, 1, 1)],
)
def test_the_rows_of_a_head_are_shared_until_the_device_is_busy(
    batch_heads, nq, per_processor, splits
):
    blocks = tiling.Blocks(64, 256, per_processor=per_processor)
    assert tiling.forward_splits(batch_heads, nq, blocks, processors=132) == splits


def test_no_rows_or_no_heads_need_one_program():
    assert tiling.num_splits(0, 5, 132) == tiling.num_splits(5, 0, 132) == 1


@pytest.mark.parametrize(
    ("heads", "size"), [(1, 256), (16, 256), (17, 128), (64, 128), (10**6, 32)]
)
def test_pytorch_tiles_shrink_as_heads_grow(heads, size):
    blocks = tiling.pytorch_blocks(heads)
    assert (blocks.block_q, blocks.block_kv) == (size, size)


def test_the_budget_of_a_forward_step_is_the_sum_of_its_tiles():
    # 64 x 256 at d = 64 in bfloat16: K and V 32 KiB each, Q 8; O 16, S 64, statistics 1.
    items = tiling.forward_step(64, 256, head_dim=64, element_size=2)
    assert tiling.held(items, "shared") == (32 + 32 + 8) * 1024
    assert tiling.held(items, "registers") == (16 + 64 + 1) * 1024


def test_the_budget_of_a_backward_step_is_the_sum_of_its_tiles():
    # 64 x 128: K and V 16 KiB each, Q, dO 8 each, dS 16; dK, dV, P, dP 32 each.
    items = tiling.backward_step(64, 128, head_dim=64, element_size=2)
    assert tiling.held(items, "shared") == (2 * 16 + 2 * 8 + 16) * 1024
    assert tiling.held(items, "registers") == 4 * 32 * 1024 + 2 * 64 * 4


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("elements", [4_096, 25_600, 116_224])
def test_the_paper_s_blocks_fill_m_without_the_scores(elements, head_dim):
    """Section 3.1: K, V, Q and O take at most 4 Bc d, which is M up to the rounding of Bc; S, which
    it leaves out, is at most Bc d more."""
    block_q, block_kv = tiling.paper_blocks(elements, head_dim)
    tiles = {i.name: i for i in tiling.forward_step(block_q, block_kv, head_dim, 4)}
    four = sum(tiles[name].bytes // 4 for name in ("K_j", "V_j", "Q_i", "O_i"))
    assert four <= 4 * block_kv * head_dim < elements + 4 * head_dim
    assert block_q * block_kv <= block_kv * head_dim


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("element_size", [2, 4])
def test_the_tuned_blocks_hold_what_an_h200_has_room_for(head_dim, element_size):
    h200 = gpus.known("h200")
    for blocks, step in (
        (tiling.tuned(tables.FORWARD, head_dim, element_size), tiling.forward_step),
        (tiling.tuned(tables.BACKWARD, head_dim, element_size), tiling.backward_step),
    ):
        items = step(blocks.block_q, blocks.block_kv, head_dim, element_size)
        assert blocks.per_processor * tiling.held(items, "shared") <= h200.shared_memory
        assert blocks.per_processor * tiling.held(items, "registers") <= h200.registers
