"""Block sizes: the paper's formula and the heuristic that shares rows among programs."""

import math

import pytest

from flash_attention import tiling


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


def test_no_rows_or_no_heads_need_one_program():
    assert tiling.num_splits(0, 5, 132) == tiling.num_splits(5, 0, 132) == 1


@pytest.mark.parametrize(
    ("heads", "size"), [(1, 256), (16, 256), (17, 128), (64, 128), (10**6, 32)]
)
def test_pytorch_tiles_shrink_as_heads_grow(heads, size):
    blocks = tiling.pytorch_blocks(heads)
    assert (blocks.block_q, blocks.block_kv) == (size, size)
