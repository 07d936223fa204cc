"""Stops a run whose loss or gradient is no longer a number."""

import math

import lightning as L
import torch
from torch import Tensor

from training.errors import DivergedError


class StopOnDivergence(L.Callback):
    """Raises DivergedError when a loss or the gradient's norm is NaN or infinite.

    They are looked at every ``every_n_steps`` optimizer steps (looking waits for the device) and
    before every validation and checkpoint, so that none is written after a bad loss or gradient.
    Weights that one update from a finite gradient made huge (a far too high learning rate) show
    in the next step's loss only: a checkpoint before that step, one at most, holds them.

    With precision=16-mixed the gradient is not looked at: its scaler leaves out such steps itself.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self._finite: Tensor | None = None  # nothing bad so far; stays on the device

    def on_train_batch_end(self, trainer: L.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        finite = torch.isfinite(outputs["loss"].detach())
        if pl_module.grad_norm is not None and trainer.precision != "16-mixed":
            finite = finite & torch.isfinite(pl_module.grad_norm)
        self._finite = finite if self._finite is None else self._finite & finite
        if trainer.global_step % self.every_n_steps == 0:
            self._look(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module) -> None:
        self._look(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module) -> None:
        loss = float(trainer.callback_metrics["val/loss"])
        if not math.isfinite(loss):
            value = "infinite" if math.isinf(loss) else "not a finite number"
            raise DivergedError(_sentence(f"validation loss was {value}", trainer.global_step))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module, checkpoint) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module) -> None:
        self._look(trainer)

    def _look(self, trainer: L.Trainer) -> None:
        if self._finite is not None and not self._finite:
            what = "training loss or its gradient was not a finite number"
            raise DivergedError(_sentence(what, trainer.global_step))


def _sentence(what: str, step: int) -> str:
    return (
        f"the {what} by step {step}; "
        "lower optim.lr, lengthen optim.warmup_steps or give precision=32-true"
    )
