"""The slot every attention backend fits: a parameter-free module with one forward."""

from torch import Tensor, nn


class Attention(nn.Module):
    """Scaled dot-product attention without parameters, so that backends are interchangeable.

    Subclasses set ``name`` and implement ``forward(q, k, v, *, causal, dropout_p, segment_ids)``
    with q ``[B, H, Nq, D]`` and k, v ``[B, Hkv, Nk, D]``, returning o ``[B, H, Nq, D]``.
    """

    name: str

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        dropout_p: float = 0.0,
        segment_ids: Tensor | None = None,
    ) -> Tensor:
        raise NotImplementedError
