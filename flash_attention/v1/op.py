"""FlashAttention V1 for users: the function, its module, and how its kernels are launched."""

from typing import Literal

from torch import Tensor

from flash_attention import launch, operator
from flash_attention.base import Attention
from flash_attention.v1 import tables, tiled

if launch.triton is not None:
    from flash_attention.v1 import backward as triton_backward
    from flash_attention.v1 import forward as triton_forward

MAX_SPLITS = 2**31 - 1  # the most programs CUDA launches


def flash_attention_v1(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    segment_ids: Tensor | None = None,
    deterministic: bool = False,
    return_stats: bool = False,
    q_splits: int | Literal["auto"] = "auto",
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Exact attention with O(N) memory (arXiv:2205.14135, Algorithms 2 and 4).

    CUDA tensors take the Triton kernels; others take the same schedule in PyTorch tiles
    (CPU tensors take the kernels through Triton's interpreter under TRITON_INTERPRET=1, set before
    this package is imported).

    Args:
        q: ``[B, H, Nq, D]``, float16, bfloat16, float32 or float64, any strides, D up to 256.
        k, v: ``[B, Hkv, Nk, D]``, H a multiple of Hkv (grouped-query attention).
        causal: mask aligned bottom-right: the last query sees the last key.
        scale: factor on QK^T as given, 0.0 included, up to 2.3e38; None means 1/sqrt(D).
        dropout_p: probability of dropping an entry of P, in [0, 1). The mask is a function of a
            seed drawn from PyTorch's generator and is replayed in backward, never stored.
        segment_ids: ``[B, N]`` integers; a token attends within its own segment only.
        deterministic: gradients repeat bit for bit (dQ is not summed with atomics).
        return_stats: also return m and l.
        q_splits: programs that share the blocks of one head: 1 is the paper's grid (batch, head);
            "auto" fills the device.
        block_q, block_kv: rows of Q and of K/V in a tile, powers of two from 16 to 256; None
            takes the tables in ``v1/tables.py``.

    Returns:
        o ``[B, H, Nq, D]`` in q's dtype (the autocast dtype under autocast), laid out as
        ``[B, Nq, H, D]``; with return_stats also m, l ``[B, H, Nq]`` float32: the row maximum of
        the scaled scores and the row sum of exp(s - m). A row that may see no key has o = 0,
        m = -inf, l = 0 and gradients 0.

    Memory: q, k, v, o, m, l are kept for backward (of q a negated copy, if scale is negative).
    Scratch of the kernels: o in float32 in forward (for half inputs); dq in float32 (for half
    inputs), a copy of dO and two float32 per row in backward; with segment_ids, three int32 per K/V
    block. The PyTorch tiles make, instead of the copy of dO: dk, dv and the product of o and dO in
    float32, and for half inputs copies of both.

    Autocast casts q, k and v (float64 excepted) and nothing inside; gradients come in the inputs'
    own dtypes. torch.compile, with fullgraph too, and CUDA graphs take forward and backward; every
    replay draws a new dropout mask. (No CUDA graph takes a compiled backward with return_stats: see
    RuntimeError.) torch.func's vmap, grad, vjp and jacrev run in eager mode, inside a compiled
    function as well; vmap with dropout follows its ``randomness``.

    Raises:
        TypeError, ValueError: see ``checks.prepare``; also for the knobs above.
        RuntimeError: on double backward, on forward-mode differentiation, or on a gradient into m
            or l other than zero (for which a compiled backward with return_stats waits for the
            device).
    """
    _check_splits(q_splits)
    return _attention(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        dropout_p=dropout_p,
        segment_ids=segment_ids,
        deterministic=deterministic,
        return_stats=return_stats,
        splits=None if q_splits == "auto" else q_splits,
        block_q=block_q,
        block_kv=block_kv,
    )


class FlashAttentionV1(Attention):
    """FlashAttention V1 as a module. Memory grows with N."""

    name = "flash_v1"

    def __init__(
        self,
        deterministic: bool = False,
        q_splits: int | Literal["auto"] = "auto",
        block_q: int | None = None,
        block_kv: int | None = None,
    ):
        super().__init__()
        _check_splits(q_splits)
        operator.check_knobs(deterministic, block_q, block_kv)
        self.knobs = dict(
            deterministic=deterministic, q_splits=q_splits, block_q=block_q, block_kv=block_kv
        )

    def forward(self, q, k, v, *, causal=True, dropout_p=0.0, segment_ids=None):
        return flash_attention_v1(
            q, k, v, causal=causal, dropout_p=dropout_p, segment_ids=segment_ids, **self.knobs
        )


def _check_splits(q_splits: int | str) -> None:
    whole = isinstance(q_splits, int) and not isinstance(q_splits, bool)
    if q_splits != "auto" and not (whole and 1 <= q_splits <= MAX_SPLITS):
        accepted = f"'auto' or an integer from 1 to {MAX_SPLITS}"
        raise ValueError(f"q_splits must be {accepted}; got {q_splits!r}")


def _forward(q, k, v, *, deterministic, splits, block_q, block_kv, **options):
    return operator.run_tuned(
        "v1 forward",
        lambda blocks: triton_forward.forward(q, k, v, splits=splits, blocks=blocks, **options),
        tables.FORWARD,
        q,
        block_q,
        block_kv,
    )


def _backward(do, q, k, v, o, m, l, *, deterministic, splits, block_q, block_kv, **options):
    splits = 1 if deterministic else splits
    return operator.run_tuned(
        "v1 backward",
        lambda blocks: triton_backward.backward(
            do, q, k, v, o, m, l, splits=splits, blocks=blocks, **options
        ),
        tables.BACKWARD,
        q,
        block_q,
        block_kv,
    )


_attention = operator.build("v1", tiled, _forward, _backward)
