"""The dropout mask as a function of (seed, head, row, column), so that backward replays it.

Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011) maps a
counter to 128 random bits without state. The counter here is (row, column // 8, batch * H + head,
0), and its bits serve eight neighbouring columns with 16 each: a tile of any shape, in any order,
in forward or backward, finds the same bits. The Triton kernels draw from ``tl.philox`` with the
same counter: all executions drop the same entries.
"""

import torch
from torch import Tensor

COLUMNS = 8  # that share a counter

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW32 = 0xFFFFFFFF


def threshold(dropout_p: float) -> int:
    """An entry is kept when its 16 random bits are at least this number. Some entry always is."""
    return min(round(dropout_p * 2**16), 2**16 - 1)


def keep_scale(dropout_p: float) -> float:
    """What an entry that is kept is multiplied by: 1 / (1 - p), p in whole 65,536ths as drawn."""
    return 1.0 / (1.0 - threshold(dropout_p) / 2**16)


def draw_seed(device: torch.device) -> Tensor:
    """A seed ``[1]`` int64 from PyTorch's generator of the device: follows torch.manual_seed, and
    activation checkpointing, which restores that generator, replays the same mask."""
    return torch.randint(0, 2**62, (1,), dtype=torch.int64, device=device)


def keep_mask(
    seed: Tensor, dropout_p: float, heads: Tensor, rows: Tensor, c0: int, c1: int
) -> Tensor:
    """True where an entry of P is kept, for columns c0 to c1 - 1.

    seed ``[1]`` int64; heads (batch * H + head) and rows are int64 tensors that broadcast to
    ``[..., R, 1]``. Returns ``[..., R, c1 - c0]``.
    """
    first = c0 // COLUMNS
    groups = torch.arange(first, -(-c1 // COLUMNS), device=seed.device)
    words = philox(seed, rows, groups, heads, torch.zeros_like(rows))  # 4 x [..., R, G]
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack(halves, dim=-1).flatten(-2)  # [..., R, 8 G]
    return bits[..., c0 - first * COLUMNS : c1 - first * COLUMNS] >= threshold(dropout_p)


def philox(seed: Tensor, c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10: four words of 32 random bits, held in int64."""
    k0, k1 = seed & _LOW32, (seed >> 32) & _LOW32
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW32, (k1 + _KEY_STEPS[1]) & _LOW32
    return c0, c1, c2, c3


def _multiply(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, in halves so that int64 does not overflow."""
    partial = (a >> 16) * b + (((a & 0xFFFF) * b) >> 16)
    return partial >> 16, ((partial & 0xFFFF) << 16) | (((a & 0xFFFF) * b) & 0xFFFF)
