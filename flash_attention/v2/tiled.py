"""FlashAttention V2's schedule in plain PyTorch: the tiles a device without Triton runs.

Algorithm 1 of arXiv:2307.08691; ``forward.py`` is the same loops as a Triton kernel. Backward:
``flash_attention/tiled.py``.
"""

import torch
from torch import Tensor

from flash_attention import launch, softmax
from flash_attention.tiled import (
    LOG2_E,
    backward,
    keep_of,
    keys_seen,
    mask_of,
    scores,
)

__all__ = ["backward", "forward"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float,
    dropout_p: float,
    seed: Tensor | None,
    segment_ids: Tensor | None,
    block_q: int,
    block_kv: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q blocks outside, K/V blocks inside; m, l and O of a block of rows stay at hand.

    q ``[B, H, Nq, D]``, k and v ``[B, Hkv, Nk, D]``. Returns o (float32, or float64 for float64
    inputs) ``[B, H, Nq, D]`` and m (base 2), l ``[B, H, Nq]``.
    """
    batch, heads, nq, _ = q.shape
    kv_heads, nk = k.shape[1], k.shape[2]
    grouped = (batch, kv_heads, heads // kv_heads, nq)
    acc = torch.promote_types(q.dtype, torch.float32)
    qg = q.unflatten(1, grouped[1:3])  # [B, Hkv, G, Nq, D], a view

    result = launch.seq_major(q, acc)
    out = result.unflatten(1, grouped[1:3])
    all_m, all_l = (q.new_empty(grouped, dtype=acc) for _ in range(2))
    for r0 in range(0, nq, block_q):
        r1 = min(r0 + block_q, nq)
        qi = qg[..., r0:r1, :].to(acc)  # [B, Hkv, G, Br, D]
        o = torch.zeros_like(qi)
        m = q.new_full(qi.shape[:-1], float("-inf"), dtype=acc)
        l = torch.zeros_like(m)
        first, stop = keys_seen(r0, r1, nq, nk, causal, segment_ids)
        for c0 in range(first // block_kv * block_kv, stop, block_kv):
            c1 = min(c0 + block_kv, nk)
            kj = k[:, :, None, c0:c1].to(acc)  # [B, Hkv, 1, Bc, D]
            vj = v[:, :, None, c0:c1].to(acc)
            mask = mask_of(r0, r1, c0, c1, nq, nk, causal, segment_ids, q.device)
            s = scores(qi, kj, scale * LOG2_E, mask)
            m, l, p, carried = softmax.advance(m, l, s, torch.exp2)
            if dropout_p > 0.0:
                p = p * keep_of(seed, dropout_p, heads, grouped, r0, r1, c0, c1, acc)
            o = o * carried[..., None] + p @ vj
        out[..., r0:r1, :] = o * softmax.inverse(l)[..., None]
        all_m[..., r0:r1], all_l[..., r0:r1] = m, l
    return result, all_m.flatten(1, 2), all_l.flatten(1, 2)
