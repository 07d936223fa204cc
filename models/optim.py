"""AdamW with linear warm-up, cosine decay and gradient clipping."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from models.checks import check_number


@dataclass(frozen=True, kw_only=True)
class AdamWCosine:
    """How parameters are updated; steps are optimizer steps.

    Args:
        lr: learning rate at the end of warm-up.
        min_lr_ratio: the learning rate at ``max_steps``, as a fraction of ``lr``.
        betas: decay rates of AdamW's two moments.
        eps: added to AdamW's denominator.
        weight_decay: decoupled decay, for matrices and embeddings only (see ``param_groups``).
        warmup_steps: steps of linear warm-up; a run of fewer steps stays within it.
        grad_clip: largest gradient norm; None or 0 turns clipping off.
        max_steps: where the decay ends.

    Raises:
        ValueError or TypeError: naming the argument, what was given and what is accepted.
    """

    lr: float
    max_steps: int
    min_lr_ratio: float = 0.1
    betas: Sequence[float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    warmup_steps: int = 0
    grad_clip: float | None = 1.0

    def __post_init__(self) -> None:
        check_number("lr", self.lr, above=0)
        check_number("min_lr_ratio", self.min_lr_ratio, at_least=0, at_most=1)
        check_number("eps", self.eps, above=0)
        check_number("weight_decay", self.weight_decay, at_least=0)
        check_number("warmup_steps", self.warmup_steps, whole=True, at_least=0)
        check_number("max_steps", self.max_steps, whole=True, at_least=1)
        if self.grad_clip is not None:
            check_number("grad_clip", self.grad_clip, at_least=0)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"betas={self.betas!r} must be two numbers")
        for beta in self.betas:
            check_number("betas", beta, at_least=0, below=1)
        # A plain tuple: this lands in checkpoints, which must load with weights_only.
        object.__setattr__(self, "betas", tuple(self.betas))

    def lr_factor(self, step: int) -> float:
        """Learning rate of optimizer step ``step`` (the first is 0), as a fraction of ``lr``."""
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)  # step 0 already learns
        if step >= self.max_steps:
            return self.min_lr_ratio
        progress = (step - self.warmup_steps) / (self.max_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))  # 1 -> 0
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * cosine

    def optimizer(self, model: nn.Module, *, fused: bool = True) -> AdamW:
        """AdamW over ``model``'s parameters, which must already be on their device.

        fused: one pass over the parameters and no temporaries, but the gradients cannot be clipped
        beforehand under a float16 loss scaler (the fused step unscales them itself).
        """
        return AdamW(
            param_groups(model, self.weight_decay),
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            fused=fused,
        )

    def scheduler(self, optimizer: Optimizer) -> LambdaLR:
        """Sets the learning rate; to be stepped after each optimizer step."""
        return LambdaLR(optimizer, lambda step: self.lr_factor(step))


def param_groups(model: nn.Module, weight_decay: float) -> list[dict]:
    """Parameters in two groups: matrices and embeddings decay; norms and biases do not.

    Pulling a norm's gain to 0 would switch its layer off, and biases do not overfit. Embeddings
    decay because the tied token embedding is also the output matrix, and GPT-2 is trained so.
    """
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        # Norms and biases are exactly the vectors.
        {"params": [p for p in params if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
    ]
