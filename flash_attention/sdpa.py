"""PyTorch's own attention under the same contract: the peer that ours is measured against."""

import torch.nn.functional as F
from torch import Tensor

from flash_attention import checks, masks
from flash_attention.base import Attention


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    segment_ids: Tensor | None = None,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` with the arguments of this package.

    Shapes, alignment and results as :func:`flash_attention.naive_attention`. Where PyTorch's own
    causal flag means something else (Nq != Nk: it aligns top-left), an explicit mask is passed,
    which costs O(N^2) memory.
    """
    q, k, v, scale = checks.prepare(q, k, v, scale, dropout_p, segment_ids)
    nq, nk = q.shape[2], k.shape[2]
    own_causal = causal and nq == nk and segment_ids is None
    mask = blind = None
    if not own_causal:
        q_pos = masks.positions(0, nq, q.device)
        k_pos = masks.positions(0, nk, q.device)
        mask = masks.visible(q_pos, k_pos, nq, nk, causal, segment_ids)
        if mask is not None and nq > nk:  # a row without a key: let it see all, then zero it
            blind = ~mask.any(dim=-1, keepdim=True)
            mask = mask | blind
    o = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=own_causal,
        scale=scale,
        dropout_p=dropout_p,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return o if blind is None else o.masked_fill(blind, 0.0)


class SDPAttention(Attention):
    """PyTorch's scaled_dot_product_attention as a module."""

    name = "sdpa"

    def forward(self, q, k, v, *, causal=True, dropout_p=0.0, segment_ids=None):
        return sdpa_attention(q, k, v, causal=causal, dropout_p=dropout_p, segment_ids=segment_ids)
