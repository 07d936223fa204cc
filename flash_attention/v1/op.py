"""FlashAttention V1 as a PyTorch operator: custom op, fake implementation, autograd.

What autograd keeps is q, k, v, o and the statistics m and l: O(N). S and P are computed again.
Inside the op m is in base 2, the row maximum times log2 e: exp2 is what the hardware has.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import custom_op

from flash_attention import checks, dropout, launch, tiling
from flash_attention.base import Attention
from flash_attention.v1 import tiled, transforms

if launch.triton is not None:
    from flash_attention.v1 import backward as triton_backward
    from flash_attention.v1 import forward as triton_forward


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
    (CPU tensors take the kernels through Triton's interpreter under TRITON_INTERPRET=1).

    Args:
        q: ``[B, H, Nq, D]``, float16, bfloat16, float32 or float64, any strides, D up to 256.
        k, v: ``[B, Hkv, Nk, D]``, H a multiple of Hkv (grouped-query attention).
        causal: mask aligned bottom-right: the last query sees the last key.
        scale: factor on QK^T as given, 0.0 included; None means 1/sqrt(D).
        dropout_p: probability of dropping an entry of P, in [0, 1). The mask is a function of a
            seed drawn from PyTorch's generator and is replayed in backward, never stored.
        segment_ids: ``[B, N]`` integers; a token attends within its own segment only.
        deterministic: gradients repeat bit for bit (dQ is not summed with atomics).
        return_stats: also return m and l.
        q_splits: programs that share the blocks of one head: 1 is the paper's grid (batch, head);
            "auto" fills the device.
        block_q, block_kv: rows of Q and of K/V in a tile, powers of two from 16 to 256; None
            takes the table in ``tiling.py``.

    Returns:
        o ``[B, H, Nq, D]`` in q's dtype (the autocast dtype under autocast), laid out as
        ``[B, Nq, H, D]``; with return_stats also m, l ``[B, H, Nq]`` float32: the row maximum of
        the scaled scores and the row sum of exp(s - m). A row that may see no key has o = 0,
        m = -inf, l = 0 and gradients 0.

    Memory: q, k, v, o, m, l are kept for backward. Scratch: o in float32 in forward (for half
    inputs); dq in float32 and one float32 per row in backward.

    Autocast casts q, k and v (float64 excepted) and nothing inside; gradients come in the inputs'
    own dtypes. torch.compile, with fullgraph too, and CUDA graphs take forward and backward; every
    replay draws a new dropout mask. torch.func's vmap, grad, vjp and jacrev run in eager mode,
    inside a compiled function as well; vmap with dropout follows its ``randomness``.

    Raises:
        TypeError, ValueError: see ``checks.prepare``; also for the knobs above.
        RuntimeError: on double backward, on forward-mode differentiation, or on a gradient into m
            or l (under torch.compile these are detached instead).
    """
    q, k, v, scale = checks.prepare(q, k, v, scale, dropout_p, segment_ids)
    _check_knobs(q_splits, block_q, block_kv)
    if segment_ids is not None:
        segment_ids = segment_ids.contiguous()  # the kernels index it as [B, N]
    if scale < 0.0:  # the op's scale is not negative: a row's maximum may be taken before scaling
        q, scale = -q, -scale
    if not torch.compiler.is_compiling():
        _refuse_forward_mode(q, k, v)
    splits = None if q_splits == "auto" else q_splits
    seed = dropout.draw_seed(q.device) if dropout_p > 0.0 else None
    o, m, l = _attend(
        q,
        k,
        v,
        segment_ids,
        seed,
        causal,
        scale,
        dropout_p,
        deterministic,
        splits,
        block_q,
        block_kv,
    )
    if not return_stats:
        return o
    m = m * math.log(2.0)  # the op's scores are in base 2
    # A compiled graph hands back zero gradients for every output, which could not be told from
    # real ones: there the statistics just leave the graph.
    if o.requires_grad and not torch.compiler.is_compiling():
        m, l = _NoGradient.apply(m, o), _NoGradient.apply(l, o)
    return o, m, l


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
        _check_knobs(q_splits, block_q, block_kv)
        self.knobs = dict(
            deterministic=deterministic, q_splits=q_splits, block_q=block_q, block_kv=block_kv
        )

    def forward(self, q, k, v, *, causal=True, dropout_p=0.0, segment_ids=None):
        return flash_attention_v1(
            q, k, v, causal=causal, dropout_p=dropout_p, segment_ids=segment_ids, **self.knobs
        )


def _check_knobs(q_splits: int | str, block_q: int | None, block_kv: int | None) -> None:
    if q_splits != "auto" and not (isinstance(q_splits, int) and q_splits >= 1):
        raise ValueError(f"q_splits must be 'auto' or an integer of at least 1; got {q_splits!r}")
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        if block is not None and block not in tiling.BLOCK_SIZES:
            raise ValueError(f"{name} must be 16, 32, 64, 128 or 256; got {block!r}")


@custom_op("flash_attention::v1_forward", mutates_args=())
def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segment_ids: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    deterministic: bool,
    splits: int | None,
    block_q: int | None,
    block_kv: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:  # nothing to launch: every row sees no key
        o = launch.seq_major(q, q.dtype, fill=0.0)
        return o, _statistics(q).fill_(float("-inf")), _statistics(q).zero_()
    options = dict(
        causal=causal, scale=scale, dropout_p=dropout_p, seed=seed, segment_ids=segment_ids
    )
    if launch.use_triton(q):
        qkv = _interpretable(q, k, v)
        o, m, l = _fitting(
            "forward",
            lambda blocks: triton_forward.forward(*qkv, splits=splits, blocks=blocks, **options),
            tiling.forward_blocks(q.shape[3], q.element_size()),
            q,
            block_q,
            block_kv,
        )
    else:
        blocks = tiling.pytorch_blocks(q.shape[0] * q.shape[1]).override(block_q, block_kv)
        with torch.autocast(q.device.type, enabled=False):  # it reaches into a custom op
            o, m, l = tiled.forward(
                q, k, v, block_q=blocks.block_q, block_kv=blocks.block_kv, **options
            )
    return launch.rounded(o, q), m, l


@custom_op("flash_attention::v1_backward", mutates_args=())
def _backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    m: Tensor,
    l: Tensor,
    segment_ids: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    scale: float,
    dropout_p: float,
    deterministic: bool,
    splits: int | None,
    block_q: int | None,
    block_kv: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or k.numel() == 0:
        return tuple(launch.seq_major(t, t.dtype, fill=0.0) for t in (q, k, v))
    options = dict(
        causal=causal, scale=scale, dropout_p=dropout_p, seed=seed, segment_ids=segment_ids
    )
    if launch.use_triton(q):
        tensors = (*_interpretable(do, q, k, v, o), m, l)
        splits = 1 if deterministic else splits
        grads = _fitting(
            "backward",
            lambda blocks: triton_backward.backward(
                *tensors, splits=splits, blocks=blocks, **options
            ),
            tiling.backward_blocks(q.shape[3], q.element_size()),
            q,
            block_q,
            block_kv,
        )
    else:
        blocks = tiling.pytorch_blocks(q.shape[0] * q.shape[1]).override(block_q, block_kv)
        with torch.autocast(q.device.type, enabled=False):
            grads = tiled.backward(
                do, q, k, v, o, m, l, block_q=blocks.block_q, block_kv=blocks.block_kv, **options
            )
    return tuple(launch.rounded(grad, t) for grad, t in zip(grads, (q, k, v), strict=True))


@_forward.register_fake
def _(q, k, v, *args):
    return launch.seq_major(q, q.dtype), _statistics(q), _statistics(q)


@_backward.register_fake
def _(do, q, k, v, *args):
    return tuple(launch.seq_major(t, t.dtype) for t in (q, k, v))


def _save(ctx, inputs, output):
    q, k, v, segment_ids, seed, *ctx.options = inputs
    o, m, l = output
    ctx.save_for_backward(q, k, v, o, m, l, segment_ids, seed)
    ctx.mark_non_differentiable(m, l)


def _differentiate(ctx, do, dm, dl):
    q, k, v, o, m, l, segment_ids, seed = ctx.saved_tensors
    grads = _gradients(do, q, k, v, o, m, l, segment_ids, seed, *ctx.options)
    return *grads, *(None,) * (2 + len(ctx.options))


class _NoGradient(torch.autograd.Function):
    """A statistic tied to o, so that a gradient into it is an error and not a silent zero."""

    generate_vmap_rule = True

    @staticmethod
    def forward(statistic, o):
        return statistic.view_as(statistic)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        raise RuntimeError(
            "flash_attention_v1 has no gradient for the statistics m and l: detach them"
        )


def _refuse_forward_mode(*tensors: Tensor) -> None:
    """A custom op without a rule for forward-mode derivatives would give tangents of zero."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(transforms.NO_FORWARD_MODE)


def _refuse_double_backward(ctx, *grads):
    raise RuntimeError(
        "flash_attention_v1 has no double backward; use naive_attention for second derivatives"
    )


_forward.register_autograd(_differentiate, setup_context=_save)
_backward.register_autograd(_refuse_double_backward)
_forward.register_vmap(transforms.fold_into_batch(_forward, seed_at=4))
_backward.register_vmap(transforms.fold_into_batch(_backward, seed_at=8))
_attend = transforms.composable(_forward, _save, _differentiate)
_gradients = transforms.composable(_backward, lambda *_: None, _refuse_double_backward)


def _statistics(q: Tensor) -> Tensor:
    """An uninitialised m or l, ``[B, H, Nq]``."""
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _fitting(
    direction: str,
    run: Callable,
    blocks: tiling.Blocks,
    q: Tensor,
    block_q: int | None,
    block_kv: int | None,
):
    """The kernel with the table's blocks, or the user's, or smaller ones where those do not fit."""
    return launch.fitting(
        run,
        blocks.override(block_q, block_kv),
        block_q is not None or block_kv is not None,
        q.device,
        direction,
        q.dtype,
        q.shape[3],
    )


def _interpretable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Triton's interpreter gets bfloat16 products wrong (Triton 3.6, 3.7): it is given float32."""
    if launch.interpreting() and not tensors[0].is_cuda:
        return tuple(t.float() if t.dtype == torch.bfloat16 else t for t in tensors)
    return tensors
