"""The versions of FlashAttention that share one suite: each a value of the fixture ``flash``."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flash_attention import (
    Attention,
    FlashAttentionV1,
    FlashAttentionV2,
    flash_attention_v1,
    flash_attention_v2,
)

OPS = torch.ops.flash_attention


@dataclass(frozen=True)
class Version:
    """A version is called as its function is."""

    function: Callable
    module: type[Attention]
    forward_op: torch._ops.OpOverload
    backward_op: torch._ops.OpOverload
    splits: bool  # whether programs may share a head's rows (q_splits)

    def __call__(self, *args, **options) -> Tensor | tuple[Tensor, Tensor, Tensor]:
        return self.function(*args, **options)


V1 = Version(
    flash_attention_v1,
    FlashAttentionV1,
    OPS.v1_forward.default,
    OPS.v1_backward.default,
    splits=True,
)
V2 = Version(
    flash_attention_v2,
    FlashAttentionV2,
    OPS.v2_forward.default,
    OPS.v2_backward.default,
    splits=False,
)
