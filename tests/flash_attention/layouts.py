"""Tensors at other strides. Memory between and around their elements is NaN: nobody may read it.

Each layout takes q, k, v or dO ``[B, H, N, D]`` and returns a view of that shape, equal in value
except where it is expanded.
"""

import torch
from torch import Tensor


def contiguous(t: Tensor) -> Tensor:
    return t.contiguous()


def transposed(t: Tensor) -> Tensor:
    """N and D swapped in memory."""
    return t.mT.contiguous().mT


def packed(t: Tensor) -> Tensor:
    """A slice of a fused [B, N, 3, H, D] projection."""
    b, h, n, d = t.shape
    return nan((b, n, 3, h, d), t)[:, :, 1].transpose(1, 2).copy_(t)


def stepped(t: Tensor) -> Tensor:
    """Every other batch entry, every third head, every fourth row."""
    b, h, n, d = t.shape
    return nan((2 * b, 3 * h, 4 * n, d), t)[1::2, 2::3, 3::4].copy_(t)


def strided_last(t: Tensor) -> Tensor:
    """Every other element of a row."""
    b, h, n, d = t.shape
    return nan((b, h, n, 2 * d), t)[..., ::2].copy_(t)


def surrounded(t: Tensor) -> Tensor:
    """The middle of a larger tensor, in every dimension; from a multiple of 16 bytes on."""
    b, h, n, d = t.shape
    return nan((b + 2, h + 2, n + 260, d + 32), t)[1:-1, 1:-1, 1:-259, 16:-16].copy_(t)


def expanded_batch(t: Tensor) -> Tensor:
    return t[:1].expand_as(t)


def expanded_heads(t: Tensor) -> Tensor:
    return t[:, :1].expand_as(t)


def expanded_rows(t: Tensor) -> Tensor:
    return t[:, :, :1].expand_as(t)


def expanded_all(t: Tensor) -> Tensor:
    """One number, as the gradient of a sum is."""
    return t[:1, :1, :1, :1].expand_as(t)


ALL = {
    f.__name__: f
    for f in (
        contiguous,
        transposed,
        packed,
        stepped,
        strided_last,
        surrounded,
        expanded_batch,
        expanded_heads,
        expanded_rows,
        expanded_all,
    )
}


def nan(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)
