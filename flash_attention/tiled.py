"""Attention by tiles in plain PyTorch, for devices without Triton: what the versions share.

Forward's order of loops is what V1 and V2 differ in (``v1/tiled.py``, ``v2/tiled.py``). Backward's
is the same in both: Algorithm 4 of arXiv:2205.14135, whose line numbers it carries, and Algorithm 2
of arXiv:2307.08691. Heads are grouped as ``[B, Hkv, G, N, D]`` (G query heads share a K/V head) so
that one batched product serves a whole group.
"""

import math

import torch
from torch import Tensor

from flash_attention import dropout, launch, masks, softmax

LOG2_E = 1.0 / math.log(2.0)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    segment_ids: Tensor | None,
    block_q: int,
    block_kv: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Algorithm 4: S and P are computed again, tile by tile, from q, k, m and l.

    q ``[B, H, Nq, D]``, k and v ``[B, Hkv, Nk, D]``, m (base 2) and l ``[B, H, Nq]``; do and o are
    like q. Returns dq, dk, dv in the dtype in which
    they were summed (float32, or float64).
    """
    batch, heads, nq, _ = q.shape
    kv_heads, nk = k.shape[1], k.shape[2]
    grouped = (batch, kv_heads, heads // kv_heads, nq)
    acc = m.dtype
    qg, og, dog = (t.unflatten(1, grouped[1:3]) for t in (q, o, do))
    mg, lg = softmax.finite(m).view(grouped), softmax.inverse(l).view(grouped)
    blind = lg == 0.0  # rows that see no key: what their dO holds is of no matter, NaN included

    dq = launch.seq_major(q, acc, fill=0.0).unflatten(1, grouped[1:3])  # line 5
    dk, dv = (launch.seq_major(t, acc, fill=0.0) for t in (k, v))
    # Line 19: D_i = rowsum(dO o O) does not depend on j, so it is taken once.
    delta = (dog.to(acc) * og.to(acc)).sum(dim=-1).masked_fill(blind, 0.0)  # [B, Hkv, G, Nq]

    for c0 in range(0, nk, block_kv):  # line 7
        c1 = min(c0 + block_kv, nk)
        kj = k[:, :, None, c0:c1].to(acc)
        vj = v[:, :, None, c0:c1].to(acc)
        first, stop = rows_seeing(c0, c1, nq, nk, causal, segment_ids)
        for r0 in range(first // block_q * block_q, stop, block_q):  # line 10
            r1 = min(r0 + block_q, nq)
            rows = slice(r0, r1)
            qi, doi = qg[..., rows, :].to(acc), dog[..., rows, :].to(acc)
            doi = doi.masked_fill(blind[..., rows, None], 0.0)
            mask = mask_of(r0, r1, c0, c1, nq, nk, causal, segment_ids, q.device)
            s = scores(qi, kj, scale * LOG2_E, mask)  # line 11
            p = torch.exp2(s - mg[..., rows, None]) * lg[..., rows, None]  # line 13
            dp = doi @ vj.transpose(-2, -1)  # line 17
            p_dropped = p
            if dropout_p > 0.0:  # lines 14, 15, 18
                keep = keep_of(seed, dropout_p, heads, grouped, r0, r1, c0, c1, acc)
                p_dropped, dp = p * keep, dp * keep
            dv[:, :, c0:c1] += (p_dropped.transpose(-2, -1) @ doi).sum(dim=2)  # line 16
            ds = p * (dp - delta[..., rows, None])  # line 20
            dq[..., rows, :] += scale * (ds @ kj)  # line 21
            dk[:, :, c0:c1] += scale * (ds.transpose(-2, -1) @ qi).sum(dim=2)  # line 22
    return dq.flatten(1, 2), dk, dv


def rows_seeing(
    c0: int, c1: int, nq: int, nk: int, causal: bool, segment_ids: Tensor | None
) -> tuple[int, int]:
    """The first row, and one past the last, that may see one of the keys c0 to c1 - 1."""
    first, stop = (0, nq) if segment_ids is None else masks.rows_of_segments(segment_ids, c0, c1)
    return max(first, masks.first_visible_row(c0, nq, nk, causal)), stop


def keys_seen(
    r0: int, r1: int, nq: int, nk: int, causal: bool, segment_ids: Tensor | None
) -> tuple[int, int]:
    """The first key, and one past the last, that one of the rows r0 to r1 - 1 may see."""
    # With segments rows and keys are the same tokens, and who may see whom is mutual.
    first, stop = (0, nk) if segment_ids is None else masks.rows_of_segments(segment_ids, r0, r1)
    return first, min(stop, max(0, r1 + nk - nq)) if causal else stop


def scores(qi: Tensor, kj: Tensor, scale2: float, mask: Tensor | None) -> Tensor:
    """S of one tile in base 2, -inf where the row may not see the key. [B, Hkv, G, Br, Bc]"""
    s = scale2 * (qi @ kj.transpose(-2, -1))
    return s if mask is None else s.masked_fill(~mask, float("-inf"))


def mask_of(
    r0: int,
    r1: int,
    c0: int,
    c1: int,
    nq: int,
    nk: int,
    causal: bool,
    segment_ids: Tensor | None,
    device: torch.device,
) -> Tensor | None:
    """Visibility of one tile, broadcastable to [B, Hkv, G, Br, Bc]; None when all is visible."""
    if causal and segment_ids is None and c1 - 1 <= r0 + nk - nq:
        return None  # wholly below the diagonal
    mask = masks.visible(
        masks.positions(r0, r1, device),
        masks.positions(c0, c1, device),
        nq,
        nk,
        causal,
        segment_ids,
    )
    return mask if segment_ids is None else mask[:, None]


def keep_of(
    seed: Tensor,
    dropout_p: float,
    heads: int,
    grouped: tuple[int, ...],
    r0: int,
    r1: int,
    c0: int,
    c1: int,
    acc: torch.dtype,
) -> Tensor:
    """Z of one tile: 1/(1-p) where an entry is kept, 0 where it is dropped."""
    batch = grouped[0]
    head = masks.positions(0, batch * heads, seed.device).view(*grouped[:3], 1, 1)
    rows = masks.positions(r0, r1, seed.device)[:, None]
    kept = dropout.keep_mask(seed, dropout_p, head, rows, c0, c1)
    return kept.to(acc) * dropout.keep_scale(dropout_p)
