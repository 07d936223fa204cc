"""A FlashAttention version as a PyTorch operator: custom op, fake implementation, autograd.

What autograd keeps is q, k, v, o and the statistics m and l: O(N). S and P are computed again.
Inside the op m is in base 2, the row maximum times log2 e: exp2 is what the hardware has.
"""

import math
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import custom_op

from flash_attention import checks, dropout, launch, statistics, tiling, transforms


def build(version: str, tiled: ModuleType, triton_forward: Callable, triton_backward: Callable):
    """The attention function of ``version``, with its ops flash_attention::{version}_forward and
    flash_attention::{version}_backward.

    tiled: the version's forward and backward in PyTorch. triton_forward(q, k, v, *, ...) and
    triton_backward(do, q, k, v, o, m, l, *, ...): its kernels; both take causal, scale, dropout_p,
    seed and segment_ids, and the knobs deterministic, splits, block_q and block_kv.
    """
    name = f"flash_attention_{version}"

    @custom_op(f"flash_attention::{version}_forward", mutates_args=())
    def forward(
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
            causal=causal, scale=scale, dropout_p=dropout_p, seed=seed,
            segment_ids=_indexable(segment_ids),
        )  # fmt: skip
        if launch.use_triton(q):
            knobs = dict(
                deterministic=deterministic, splits=splits, block_q=block_q, block_kv=block_kv
            )
            o, m, l = triton_forward(*_interpretable(q, k, v), **options, **knobs)
        else:
            blocks = tiling.pytorch_blocks(q.shape[0] * q.shape[1]).override(block_q, block_kv)
            with torch.autocast(q.device.type, enabled=False):  # it reaches into a custom op
                o, m, l = tiled.forward(
                    q, k, v, block_q=blocks.block_q, block_kv=blocks.block_kv, **options
                )
        return launch.rounded(o, q), m, l

    @custom_op(f"flash_attention::{version}_backward", mutates_args=())
    def backward(
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
        m, l = _indexable(m), _indexable(l)
        options = dict(
            causal=causal, scale=scale, dropout_p=dropout_p, seed=seed,
            segment_ids=_indexable(segment_ids),
        )  # fmt: skip
        if launch.use_triton(q):
            knobs = dict(
                deterministic=deterministic, splits=splits, block_q=block_q, block_kv=block_kv
            )
            tensors = (*_interpretable(do, q, k, v, o), m, l)
            grads = triton_backward(*tensors, **options, **knobs)
        else:
            blocks = tiling.pytorch_blocks(q.shape[0] * q.shape[1]).override(block_q, block_kv)
            with torch.autocast(q.device.type, enabled=False):
                grads = tiled.backward(
                    do, q, k, v, o, m, l,
                    block_q=blocks.block_q, block_kv=blocks.block_kv, **options,
                )  # fmt: skip
        return tuple(launch.rounded(grad, t) for grad, t in zip(grads, (q, k, v), strict=True))

    @forward.register_fake
    def _(q, k, v, *args):
        return launch.seq_major(q, q.dtype), _statistics(q), _statistics(q)

    @backward.register_fake
    def _(do, q, k, v, *args):
        return tuple(launch.seq_major(t, t.dtype) for t in (q, k, v))

    def save(ctx, inputs, output):
        q, k, v, segment_ids, seed, *ctx.options = inputs
        o, m, l = output
        saved = q, k, v, o, m, l, segment_ids, seed
        ctx.save_for_backward(*saved)
        ctx.save_for_forward(*saved)  # until forward ends; without it vmap cannot come to our jvp
        ctx.mark_non_differentiable(m, l)
        ctx.set_materialize_grads(False)  # of m and l they would be two [B, H, Nq] of zeros

    def differentiate(ctx, do, dm, dl):
        no_others = (None,) * (2 + len(ctx.options))
        if do is None:  # what followed o has no gradient for it
            return None, None, None, *no_others
        q, k, v, o, m, l, segment_ids, seed = ctx.saved_tensors
        return *gradients(do, q, k, v, o, m, l, segment_ids, seed, *ctx.options), *no_others

    def refuse_double_backward(ctx, *grads):
        raise RuntimeError(
            f"{name} has no double backward; use naive_attention for second derivatives"
        )

    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(refuse_double_backward)
    forward.register_vmap(transforms.fold_into_batch(forward, seed_at=4))
    backward.register_vmap(transforms.fold_into_batch(backward, seed_at=8))
    attend = transforms.composable(name, forward, save, differentiate)
    gradients = transforms.composable(name, backward, lambda *_: None, refuse_double_backward)

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool,
        scale: float | None,
        dropout_p: float,
        segment_ids: Tensor | None,
        deterministic: bool,
        return_stats: bool,
        splits: int | None = None,
        block_q: int | None,
        block_kv: int | None,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        q, k, v, scale = checks.prepare(q, k, v, scale, dropout_p, segment_ids)
        _check_flag("causal", causal)
        check_knobs(deterministic, block_q, block_kv)
        if scale < 0.0:  # the op's scale is not: a row's maximum may be taken before scaling
            q, scale = -q, -scale
        # torch.func's wrapped tensors cannot be asked for tangents; there the Function refuses.
        if not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()):
            _refuse_forward_mode(name, q, k, v)
        seed = dropout.draw_seed(q.device) if dropout_p > 0.0 else None
        knobs = (deterministic, splits, block_q, block_kv)
        o, m, l = attend(q, k, v, segment_ids, seed, causal, scale, dropout_p, *knobs)
        if not return_stats:
            return o
        m = m * math.log(2.0)  # the op's scores are in base 2
        # Inside vmap no tensor says that one outside requires gradients.
        if o.requires_grad or torch._C._are_functorch_transforms_active():
            m, l = (statistics.without_gradient(t, o, name) for t in (m, l))
        return o, m, l

    return attention


def check_knobs(deterministic: bool, block_q: int | None, block_kv: int | None) -> None:
    """What the op's schema would refuse in its own words: there 16.0 is no int, nor "yes" a bool.

    Raises:
        TypeError: deterministic is neither True nor False.
        ValueError: a block size is none of ``tiling.BLOCK_SIZES``.
    """
    _check_flag("deterministic", deterministic)
    for name, block in (("block_q", block_q), ("block_kv", block_kv)):
        known = isinstance(block, int) and block in tiling.BLOCK_SIZES
        if block is not None and not known:
            raise ValueError(f"{name} must be 16, 32, 64, 128 or 256; got {block!r}")


def _check_flag(name: str, flag: bool) -> None:
    if flag not in (True, False):
        raise TypeError(f"{name} must be True or False; got {flag!r}")


def run_tuned(
    kernel: str,
    run: Callable,
    table: dict[tuple[int, int], tiling.Blocks],
    q: Tensor,
    block_q: int | None,
    block_kv: int | None,
):
    """``run(blocks)`` with the table's blocks, or the user's, or smaller ones where those do not
    fit."""
    blocks = tiling.tuned(table, q.shape[3], q.element_size())
    return launch.fitting(
        run,
        blocks.override(block_q, block_kv),
        block_q is not None or block_kv is not None,
        q.device,
        kernel,
        q.dtype,
        q.shape[3],
    )


def _refuse_forward_mode(name: str, *tensors: Tensor) -> None:
    """A custom op without a rule for forward-mode derivatives would give tangents of zero."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise RuntimeError(transforms.NO_FORWARD_MODE.format(name))


def _statistics(q: Tensor) -> Tensor:
    """An uninitialised m or l, ``[B, H, Nq]``."""
    return q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))


def _indexable(t: Tensor | None) -> Tensor | None:
    """m, l or segment_ids as the kernels index them, by position: their strides are not asked for.
    Not contiguous when vmap repeats one batch entry, or where the op is called with a slice."""
    return None if t is None else t.contiguous()


def _interpretable(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Triton's interpreter gets bfloat16 products wrong (Triton 3.6, 3.7): it is given float32."""
    if launch.interpreting() and not tensors[0].is_cuda:
        return tuple(t.float() if t.dtype == torch.bfloat16 else t for t in tensors)
    return tensors
