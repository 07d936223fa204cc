"""What every attention function refuses, and the dtype it computes in. One place, one wording."""

import math

import torch
from torch import Tensor

MAX_HEAD_DIM = 256
MAX_SCALE = 2.3e38  # times log2 e, float32 still holds it
SEGMENT_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    dropout_p: float,
    segment_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check the arguments and return q, k, v in the compute dtype with the scale made a number.

    q ``[B, H, Nq, D]``; k, v ``[B, Hkv, Nk, D]``; segment_ids ``[B, N]`` with N = Nq = Nk.
    Under autocast q, k and v are cast to the autocast dtype, float64 left alone, as PyTorch's own
    attention does; after that their dtypes must agree.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype outside ``DTYPES``.
        ValueError: shapes, devices, scale, dropout_p or segment_ids that do not fit.
    """
    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(t).__name__}")
    q, k, v = _autocast(q, k, v)
    _check_dtypes(q, k, v)
    _check_shapes(q, k, v)
    for name, number in (("dropout_p", dropout_p), ("scale", 1.0 if scale is None else scale)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise TypeError(f"{name} must be a number; got {number!r}")
    # Not math.isfinite: a compiled graph breaks there once it has met a second scale.
    if scale is not None and not -MAX_SCALE <= scale <= MAX_SCALE:
        raise ValueError(f"scale must be between -{MAX_SCALE} and {MAX_SCALE}; got {scale}")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p must be in [0, 1); got {dropout_p}")
    if segment_ids is not None:
        _check_segment_ids(segment_ids, q, k)
    if scale is None:
        scale = 1.0 / math.sqrt(max(q.shape[-1], 1))
    return q, k, v, float(scale)


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """What PyTorch's autocast casts: floating-point tensors, float64 left out."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t for t in tensors
    )


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q, k and v must have the same dtype; got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if q.dtype not in DTYPES:
        raise TypeError(f"q, k and v must be float16, bfloat16, float32 or float64; got {q.dtype}")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.dim() != 4:
            raise ValueError(f"{name} must be [batch, heads, N, D]; got shape {tuple(t.shape)}")
        if t.device != q.device:
            raise ValueError(
                f"q, k and v must be on one device; q is on {q.device}, {name} on {t.device}"
            )
    if k.shape != v.shape:
        raise ValueError(
            f"k and v must have the same shape; got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    batch, heads, _, head_dim = q.shape
    kv_batch, kv_heads, _, kv_head_dim = k.shape
    if batch != kv_batch:
        raise ValueError(f"q and k must have the same batch size; got {batch} and {kv_batch}")
    if head_dim != kv_head_dim:
        raise ValueError(f"q and k must have the same head dim; got {head_dim} and {kv_head_dim}")
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head dim must be 1 to {MAX_HEAD_DIM}; got {head_dim}")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"the number of heads in k and v must divide that of q; got {kv_heads} and {heads}"
        )


def _check_segment_ids(segment_ids: Tensor, q: Tensor, k: Tensor) -> None:
    if not isinstance(segment_ids, Tensor) or segment_ids.dtype not in SEGMENT_DTYPES:
        got = segment_ids.dtype if isinstance(segment_ids, Tensor) else type(segment_ids).__name__
        accepted = "int64, int32, int16, int8, uint8 or bool"
        raise TypeError(f"segment_ids must be a tensor of {accepted}; got {got}")
    batch, _, nq, _ = q.shape
    nk = k.shape[2]
    if nq != nk:
        raise ValueError(f"segment_ids needs as many queries as keys; got {nq} and {nk}")
    if tuple(segment_ids.shape) != (batch, nq):
        raise ValueError(
            f"segment_ids must be [batch, N] = {(batch, nq)}; got {tuple(segment_ids.shape)}"
        )
    if segment_ids.device != q.device:
        raise ValueError(f"segment_ids must be on q's device {q.device}; got {segment_ids.device}")
