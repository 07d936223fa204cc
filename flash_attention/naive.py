"""Standard attention: S = QK^T, P = softmax(S), O = PV, each N x N matrix held in memory.

This is algorithm 0 of the FlashAttention paper (arXiv:2205.14135, section 2.2) and what autograd
keeps for it: P, once per head, in float32 and in the input's dtype. It is the reference the
kernels are compared with, so it is written to be read, not to be fast.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attention import checks, masks
from flash_attention.base import Attention


def naive_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """Exact attention in O(N^2) memory.

    Args:
        q: ``[B, H, Nq, D]``.
        k, v: ``[B, Hkv, Nk, D]``, H a multiple of Hkv (grouped-query attention).
        causal: mask aligned bottom-right: the last query sees the last key.
        scale: factor on QK^T as given; None means 1/sqrt(D).
        dropout_p: probability of dropping an entry of P, in [0, 1).
        segment_ids: ``[B, N]`` integers; a token attends within its own segment only.

    Returns:
        o ``[B, H, Nq, D]`` in q's dtype (the autocast dtype under autocast). A row that may see
        no key is 0, and so are its gradients.
    """
    q, k, v, scale = checks.prepare(q, k, v, scale, dropout_p, segment_ids)
    nq, nk = q.shape[2], k.shape[2]
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)

    s = (q @ k.transpose(-2, -1)) * scale  # [B, H, Nq, Nk]
    q_pos = masks.positions(0, nq, q.device)
    k_pos = masks.positions(0, nk, q.device)
    mask = masks.visible(q_pos, k_pos, nq, nk, causal, segment_ids)
    blind = None  # rows that see no key: softmax over nothing would be NaN
    if mask is not None:
        s = s.masked_fill(~mask, float("-inf"))
        if nq > nk:  # bottom-right causal then leaves the first rows without a key
            blind = ~mask.any(dim=-1, keepdim=True)
            s = s.masked_fill(blind, 0.0)
    # Softmax in float32 for half inputs, as every trusted implementation does.
    p = torch.softmax(s, dim=-1, dtype=torch.promote_types(s.dtype, torch.float32)).to(v.dtype)
    if blind is not None:
        p = p.masked_fill(blind, 0.0)
    if dropout_p > 0.0:
        p = F.dropout(p, dropout_p)
    return p @ v


class NaiveAttention(Attention):
    """Standard attention as a module. Memory grows with N^2."""

    name = "naive"

    def forward(self, q, k, v, *, causal=True, dropout_p=0.0, segment_ids=None):
        return naive_attention(q, k, v, causal=causal, dropout_p=dropout_p, segment_ids=segment_ids)
