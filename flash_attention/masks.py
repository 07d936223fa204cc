"""Which query may see which key. The one rule that every backend and the tests share."""

import torch
from torch import Tensor


def visible(
    q_pos: Tensor,
    k_pos: Tensor,
    nq: int,
    nk: int,
    causal: bool,
    segment_ids: Tensor | None,
) -> Tensor | None:
    """Boolean mask of the pairs that may attend, or None when all may.

    q_pos ``[R]`` and k_pos ``[C]`` are positions in the whole sequence, so that a tile and the
    whole matrix ask the same function. Causal masks are aligned bottom-right: the last query sees
    the last key. Returns ``[R, C]``, or ``[B, 1, R, C]`` when segment_ids ``[B, N]`` is given.
    """
    mask = None
    if causal:
        mask = k_pos[None, :] <= q_pos[:, None] + (nk - nq)  # [R, C]
    if segment_ids is not None:
        same = segment_ids[:, q_pos, None] == segment_ids[:, None, k_pos]  # [B, R, C]
        mask = (same if mask is None else same & mask)[:, None]
    return mask


def first_visible_row(key: int, nq: int, nk: int, causal: bool) -> int:
    """First query row that may see ``key``: causal rows above it need no work."""
    return max(0, key - (nk - nq)) if causal else 0


def rows_of_segments(segment_ids: Tensor, c0: int, c1: int) -> tuple[int, int]:
    """The first row and one past the last that may see one of the keys c0 to c1 - 1 of their batch
    entry: rows whose segment lies between the least and the greatest there. No other needs work.
    """
    ids = segment_ids[:, c0:c1]  # [B, C]
    inside = (segment_ids >= ids.amin(1, keepdim=True)) & (segment_ids <= ids.amax(1, keepdim=True))
    rows = inside.any(dim=0).nonzero()
    return int(rows[0]), int(rows[-1]) + 1


def positions(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, device=device)
