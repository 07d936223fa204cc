"""Which tokens meet a block of tokens when segment_ids are given: blocks of others are skipped.

Rows and keys are the same tokens there, and who may see whom is mutual: the block is one of keys
and the tokens are rows, or the other way round. Segment ids may come in any order. A token may meet
one of the block only if its id lies between the least and the greatest id there; for packed
documents, whose ids ascend, this is exact.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 1024  # tokens looked at in one go


@triton.jit
def _spans_kernel(
    segment_ptr, span_ptr, blocks, n, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Program b * blocks + j: the span of block j."""
    program = tl.program_id(0)
    segment_ptr += (program // blocks).to(tl.int64) * n
    # Positions beyond n stand for the last one, which changes neither a minimum nor a maximum.
    own = tl.load(segment_ptr + tl.minimum(program % blocks * BLOCK + tl.arange(0, BLOCK), n - 1))
    least, greatest = tl.min(own, axis=0), tl.max(own, axis=0)
    first, stop, count = n, 0, 0
    for start in range(0, n, CHUNK):
        tokens = start + tl.arange(0, CHUNK)
        ids = tl.load(segment_ptr + tokens, mask=tokens < n, other=0)
        inside = (tokens < n) & (ids >= least) & (ids <= greatest)
        first = tl.minimum(first, tl.min(tl.where(inside, tokens, n), axis=0))
        stop = tl.maximum(stop, tl.max(tl.where(inside, tokens + 1, 0), axis=0))
        count += tl.sum(inside.to(tl.int32), axis=0)
    one_segment = (least == greatest) & (count == stop - first)
    span_ptr += program * 3
    tl.store(span_ptr, first)
    tl.store(span_ptr + 1, stop)
    tl.store(span_ptr + 2, one_segment.to(tl.int32))


def spans(segment_ids: Tensor, block: int) -> Tensor:
    """For each block of so many tokens: the first token that may meet one of them, one past the
    last such token, and 1 if these and the block's are all of one segment (else 0).

    segment_ids ``[B, N]``, contiguous. Returns ``[B, ceil(N / block), 3]`` int32.
    """
    batch, n = segment_ids.shape
    blocks = triton.cdiv(n, block)
    out = torch.empty((batch, blocks, 3), dtype=torch.int32, device=segment_ids.device)
    _spans_kernel[(batch * blocks,)](segment_ids, out, blocks, n, BLOCK=block, CHUNK=CHUNK)
    return out
