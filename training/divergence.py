"""Stops a run whose loss is no longer a number."""

import math

import lightning as L
import torch
from torch import Tensor

from training.errors import DivergedError


class StopOnDivergence(L.Callback):
    """Raises DivergedError when a training or validation loss is NaN or infinite.

    The losses are looked at every ``every_n_steps`` optimizer steps (looking waits for the device),
    before every validation, and before every checkpoint: a bad one is never written.
    """

    def __init__(self, every_n_steps: int) -> None:
        self.every_n_steps = every_n_steps
        self._finite: Tensor | None = None  # no bad loss so far; stays on the device

    def on_train_batch_end(self, trainer: L.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        finite = torch.isfinite(outputs["loss"].detach())
        self._finite = finite if self._finite is None else self._finite & finite
        if trainer.global_step % self.every_n_steps == 0:
            self._look(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module) -> None:
        self._look(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module) -> None:
        loss = float(trainer.callback_metrics["val/loss"])
        if not math.isfinite(loss):
            raise DivergedError(_sentence("validation", loss, trainer.global_step))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module, checkpoint) -> None:
        self._look(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module) -> None:
        self._look(trainer)

    def _look(self, trainer: L.Trainer) -> None:
        if self._finite is not None and not self._finite:
            raise DivergedError(_sentence("training", math.nan, trainer.global_step))


def _sentence(which: str, loss: float, step: int) -> str:
    value = "infinite" if math.isinf(loss) else "not a finite number"
    return (
        f"the {which} loss was {value} by step {step}; "
        "lower optim.lr, lengthen optim.warmup_steps or give precision=32-true"
    )
