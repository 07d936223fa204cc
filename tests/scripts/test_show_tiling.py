"""The printed plan of block sizes."""

import pytest

from flash_attention import tiling
from flash_attention.v1 import tables
from scripts import show_tiling


def test_the_plan_of_an_h200_shows_the_formula_the_budget_and_what_does_not_fit(capsys):
    assert show_tiling.main(["--device=h200", "--head-dim=64"]) == 0
    printed = capsys.readouterr().out
    # 227 KiB are 116,224 elements of two bytes; over 4 d = 256 that is 454, and d is 64.
    assert "Bc = ceil(M / 4d) = 454, Br = min(Bc, d) = 64" in printed
    assert "forward, tuned: Br = 64, Bc = 256, 2 programs" in printed
    # K, V 454 x 64 x 2 bytes each and Q, O, S: all in; dK, dV, P, dP in float32: 454 KiB, not.
    says = [line for line in printed.splitlines() if "all programs" in line]
    assert ["does not fit" in line for line in says] == [False] * 5 + [True] + [False] * 2


@pytest.mark.parametrize("head_dim", [64, 128])
def test_what_is_said_of_the_tuned_sizes_is_true_of_them(head_dim):
    """WHY: "in forward with d of 64 or 128 and 16 bits"."""
    blocks = tiling.tuned(tables.FORWARD, head_dim, 2)
    items = tiling.forward_step(blocks.block_q, blocks.block_kv, head_dim, 2)
    s = 4 * blocks.block_q * blocks.block_kv
    assert all(item.bytes <= s for item in items)
    assert blocks.block_q >= 64


@pytest.mark.parametrize("bad", [["--device=tpu"], ["--device=h200", "--head-dim=0"]])
def test_a_bad_argument_is_refused(bad, capsys):
    with pytest.raises(SystemExit) as stop:
        show_tiling.main(bad)
    assert stop.value.code == 2
    assert bad[-1].split("=")[0] in capsys.readouterr().err
