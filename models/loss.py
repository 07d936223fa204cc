"""The training loss."""

import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy in nats per target, computed in float32.

    logits ``[..., V]`` of any float dtype; targets ``[...]`` int64 in ``[0, V)``. Positions whose
    target is -100 count neither in the sum nor in the mean; if all are, the mean is NaN. reduction:
    "mean", or "none" for each target's own, ``[...]``, 0 where it is -100.
    """
    losses = F.cross_entropy(
        logits.flatten(0, -2).float(), targets.flatten(), ignore_index=IGNORE, reduction=reduction
    )
    return losses.view(targets.shape) if reduction == "none" else losses
