"""FlashAttention V1's schedule in plain PyTorch: the tiles a device without Triton runs.

The loops, names and line numbers are those of the paper (arXiv:2205.14135): Algorithm 2.
``forward.py`` is the same loops as a Triton kernel. Backward: ``flash_attention/tiled.py``.
"""

import torch
from torch import Tensor

from flash_attention import launch, softmax
from flash_attention.tiled import LOG2_E, backward, keep_of, mask_of, rows_seeing, scores

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
    """Algorithm 2: K/V blocks outside, Q blocks inside, running m, l, O between them.

    q ``[B, H, Nq, D]``, k and v ``[B, Hkv, Nk, D]``. Returns o (float32, or float64 for float64
    inputs) ``[B, H, Nq, D]`` and m (base 2), l
    ``[B, H, Nq]``.
    """
    batch, heads, nq, _ = q.shape
    kv_heads, nk = k.shape[1], k.shape[2]
    grouped = (batch, kv_heads, heads // kv_heads, nq)
    acc = torch.promote_types(q.dtype, torch.float32)
    scale2 = scale * LOG2_E
    qg = q.unflatten(1, grouped[1:3])  # [B, Hkv, G, Nq, D], a view

    # Line 2: O = 0, l = 0, m = -inf, in memory.
    result = launch.seq_major(q, acc, fill=0.0)
    o = result.unflatten(1, grouped[1:3])
    l = q.new_zeros(grouped, dtype=acc)
    m = q.new_full(grouped, float("-inf"), dtype=acc)

    for c0 in range(0, nk, block_kv):  # line 5
        c1 = min(c0 + block_kv, nk)
        kj = k[:, :, None, c0:c1].to(acc)  # [B, Hkv, 1, Bc, D], line 6
        vj = v[:, :, None, c0:c1].to(acc)
        first, stop = rows_seeing(c0, c1, nq, nk, causal, segment_ids)
        for r0 in range(first // block_q * block_q, stop, block_q):  # line 7
            r1 = min(r0 + block_q, nq)
            mask = mask_of(r0, r1, c0, c1, nq, nk, causal, segment_ids, q.device)
            s = scores(qg[..., r0:r1, :].to(acc), kj, scale2, mask)  # lines 8 to 11
            keep = None
            if dropout_p > 0.0:  # line 14
                keep = keep_of(seed, dropout_p, heads, grouped, r0, r1, c0, c1, acc)
            rows = softmax.State(m[..., r0:r1], l[..., r0:r1], o[..., r0:r1, :])
            rows = softmax.update(rows, s, vj, keep, torch.exp2)  # lines 10 to 15
            m[..., r0:r1], l[..., r0:r1], o[..., r0:r1, :] = rows  # lines 15 and 16
    return result, m.flatten(1, 2), l.flatten(1, 2)
