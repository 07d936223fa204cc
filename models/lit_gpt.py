"""The LightningModule: what a training step, a validation step and an update are."""

import lightning as L
import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from models.gpt import GPT
from models.loss import IGNORE, ChunkedLoss, FullLoss
from models.optim import AdamWCosine


class LitGPT(L.LightningModule):
    """Trains ``model`` on batches ``{"tokens": int64 [B, N + 1]}``: N inputs and their successors.

    A batch may hold ``"targets"`` too, int64 ``[B, N]``: the successors, -100 for those that do not
    count.

    Args:
        model: the GPT.
        optim: optimizer, schedule and clipping.
        compile: run ``model`` and the full loss through torch.compile; parameter names stay the
            same.
        loss_fn: how the loss is computed; None: over all logits at once.

    Attributes:
        grad_norm: norm of the last optimizer step's gradient before clipping, a 0-dim tensor on
            the model's device (reading its value waits for the device); None before the first.
    """

    def __init__(
        self,
        model: GPT,
        optim: AdamWCosine,
        compile: bool = False,
        loss_fn: FullLoss | ChunkedLoss | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.optim = optim
        self.loss_fn = loss_fn or FullLoss()
        self.grad_norm: Tensor | None = None
        if compile:
            # Hooks on saved tensors, which offloading needs, do not go into a compiled graph.
            for part in model.blocks if model.offload else [model]:
                part.compile()  # in place, unlike torch.compile: no `_orig_mod.` in state_dict
            if isinstance(self.loss_fn, FullLoss):  # the other one has no logits of all tokens
                self.loss_fn.compile()

    def loss(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Mean next-token loss in nats of tokens ``[B, N + 1]``, of targets only if given."""
        return self.loss_fn(self.model, tokens, targets)

    def token_losses(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Each next token's loss, float32 ``[B, N]``; 0 where it does not count. No gradient."""
        return self.loss_fn.per_token(self.model, tokens, targets)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch["tokens"], batch.get("targets"))

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Returns ``{"losses": float32 [B, N]}``, each token's own, for callbacks."""
        targets = batch.get("targets")
        losses = self.token_losses(batch["tokens"], targets)
        n_targets = losses.numel() if targets is None else int((targets != IGNORE).sum())
        # Weighted by targets, so that a smaller last batch does not count like a whole one.
        # Kept for the callback that reports validations; written by it, not by Lightning too.
        self.log("val/loss", losses.sum() / n_targets, batch_size=n_targets, logger=False)
        return {"losses": losses}

    def configure_optimizers(self) -> dict:
        # The float16 scaler and a fused optimizer together would clip gradients still scaled.
        fused = self.trainer.precision != "16-mixed"
        optimizer = self.optim.optimizer(self.model, fused=fused)
        scheduler = {"scheduler": self.optim.scheduler(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Keep the gradient's norm and clip to ``optim.grad_clip``; called before every update."""
        if gradient_clip_val is not None:
            raise ValueError(
                f"the Trainer's gradient_clip_val={gradient_clip_val} is not used; "
                "set grad_clip of the optimizer settings instead"
            )
        params = [p for p in self.model.parameters() if p.grad is not None]
        self.grad_norm = get_total_norm([p.grad for p in params])
        if self.optim.grad_clip:
            clip_grads_with_norm_(params, self.optim.grad_clip, self.grad_norm)
