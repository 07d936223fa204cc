"""FlashAttention V2 for users: the function, its module, and how its kernels are launched."""

from torch import Tensor

from flash_attention import launch, operator
from flash_attention.base import Attention
from flash_attention.v2 import tables, tiled

if launch.triton is not None:
    from flash_attention.delta import delta
    from flash_attention.v2 import backward as triton_backward
    from flash_attention.v2 import forward as triton_forward


def flash_attention_v2(
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
    block_q: int | None = None,
    block_kv: int | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Exact attention with O(N) memory in FlashAttention-2's order (arXiv:2307.08691, Algorithms 1
    and 2): Q blocks outside, so that O never passes through memory.

    Arguments, results, errors and where it runs are those of
    :func:`flash_attention.flash_attention_v1`, but for

        deterministic: changes nothing, as gradients always repeat bit for bit.
        q_splits: not taken, as every Q block is a program.
        block_q, block_kv: of all three kernels; None takes each one's table in ``v2/tables.py``.

    Memory: as V1's, but for the scratch of the kernels: a copy of dO and two float32 per row in
    backward; with segment_ids, three int32 per block.
    """
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
        block_q=block_q,
        block_kv=block_kv,
    )


class FlashAttentionV2(Attention):
    """FlashAttention V2 as a module. Memory grows with N."""

    name = "flash_v2"

    def __init__(
        self,
        deterministic: bool = False,
        block_q: int | None = None,
        block_kv: int | None = None,
    ):
        super().__init__()
        operator.check_knobs(deterministic, block_q, block_kv)
        self.knobs = dict(deterministic=deterministic, block_q=block_q, block_kv=block_kv)

    def forward(self, q, k, v, *, causal=True, dropout_p=0.0, segment_ids=None):
        return flash_attention_v2(
            q, k, v, causal=causal, dropout_p=dropout_p, segment_ids=segment_ids, **self.knobs
        )


def _forward(q, k, v, *, deterministic, splits, block_q, block_kv, **options):
    return operator.run_tuned(
        "v2 forward",
        lambda blocks: triton_forward.forward(q, k, v, blocks=blocks, **options),
        tables.FORWARD,
        q,
        block_q,
        block_kv,
    )


# Each kernel has blocks of its own, made smaller by themselves where they do not fit.
def _backward(do, q, k, v, o, m, l, *, deterministic, splits, block_q, block_kv, **options):
    scaled_do, lse, row_delta = delta(o, do, m, l)
    given = (scaled_do, q, k, v, lse, row_delta)
    dk, dv = operator.run_tuned(
        "v2 dk dv",
        lambda blocks: triton_backward.dk_dv(*given, blocks=blocks, **options),
        tables.DK_DV,
        q,
        block_q,
        block_kv,
    )
    dq = operator.run_tuned(
        "v2 dq",
        lambda blocks: triton_backward.dq(*given, blocks=blocks, **options),
        tables.DQ,
        q,
        block_q,
        block_kv,
    )
    return dq, dk, dv


_attention = operator.build("v2", tiled, _forward, _backward)
