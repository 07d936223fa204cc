"""Causal self-attention of one GPT block: projections, rotary positions and the kernel's slot."""

import torch
from torch import Tensor, nn

from flash_attention import Attention


def rotary_tables(seq_len: int, head_dim: int, base: float = 10000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotation angles, each float32 ``[seq_len, head_dim / 2]``.

    Pair ``i`` of a head's channels turns by ``position * base ** (-2 i / head_dim)`` radians.
    ``head_dim`` must be even.
    """
    frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    # float64: at position 10^6 a float32 angle would be off by several hundredths of a radian.
    angles = torch.outer(torch.arange(seq_len, dtype=torch.float64), frequencies)
    return angles.cos().float(), angles.sin().float()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs ``(i, i + D/2)`` of x ``[B, N, H, D]`` by their position's angle.

    cos, sin: float32 ``[>= N, D/2]``. The rotation is done in float32; the result has x's dtype.
    """
    n = x.size(1)
    cos, sin = cos[:n, None], sin[:n, None]  # [N, 1, D/2]
    a, b = x.chunk(2, dim=-1)  # [B, N, H, D/2] each
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Multi-head (or grouped-query) self-attention over ``[B, N, width]``.

    ``kernel`` computes ``softmax(q k^T) v``; it has no parameters, so checkpoints do not depend on
    which one is chosen.
    """

    def __init__(
        self,
        *,
        width: int,
        n_head: int,
        n_kv_head: int,
        attention: Attention,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        self.n_head = n_head
        self.n_kv_head = n_kv_head
        self.head_dim = width // n_head
        self.dropout = dropout
        self.kernel = attention
        self.qkv = nn.Linear(width, (n_head + 2 * n_kv_head) * self.head_dim, bias=bias)
        self.proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """x ``[B, N, width]`` -> ``[B, N, width]``; rotary: the tables, or None for no rotation."""
        batch, n, width = x.shape
        heads = self.qkv(x).view(batch, n, self.n_head + 2 * self.n_kv_head, self.head_dim)
        qk, v = heads.split((self.n_head + self.n_kv_head, self.n_kv_head), dim=2)
        if rotary is not None:
            qk = apply_rotary(qk, *rotary)  # queries and keys turn alike: one pass for both
            # Backward keeps what the kernel is given. A view of v would keep the unrotated q and k
            # with it (5 N width in all); its own copy lets them go (3 N width).
            v = v.clone()
        q, k = qk.split((self.n_head, self.n_kv_head), dim=2)
        # Strided views [B, H, N, D]: the kernels take any stride.
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        dropout_p = self.dropout if self.training else 0.0
        o = self.kernel(q, k, v, causal=True, dropout_p=dropout_p)  # [B, H, N, D]
        return self.proj(o.transpose(1, 2).reshape(batch, n, width))
