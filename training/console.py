"""What a run shows while it trains: a line per validation, and on a terminal a progress bar."""

import logging
import math
import time
import warnings

import lightning as L
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from training.metrics import MetricsCallback

console = Console(highlight=False, soft_wrap=True, markup=False)


def quiet() -> None:
    """Silences what Lightning, PyTorch and W&B say about themselves; errors still come through."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("lightning", "torch", "wandb", "pydantic"):
        warnings.filterwarnings("ignore", module=rf"{module}(\.|$)")


class ValidationReport(L.Callback):
    """Logs and prints each validation: loss in nats per token, and bits per byte of text.

    Bits per byte compare over tokenisers: the loss per token in bits, over the bytes of a token.

    Attributes:
        loss, bits_per_byte: of the last validation; None before it.
        step: the optimizer step of the last validation.
    """

    def __init__(self) -> None:
        self.loss: float | None = None
        self.bits_per_byte: float | None = None
        self.step: int | None = None

    def on_train_batch_end(self, trainer: L.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        # A sign of life: the first validation may be minutes away.
        if trainer.global_step == 1 and "train/loss" in latest_row(trainer) and not self._begun:
            self._begun = True
            loss, seconds = latest_row(trainer)["train/loss"], time.monotonic() - self._started
            console.print(f"{step_text(trainer, 1)}  train loss {loss:.3f}  {seconds:.1f} s")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.monotonic()
        self._begun = False

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.step = trainer.global_step
        self.loss = float(trainer.callback_metrics["val/loss"])
        self.bits_per_byte = self.loss / math.log(2) / trainer.datamodule.bytes_per_token
        row = {"val/loss": self.loss, "val/bits_per_byte": self.bits_per_byte}
        for logger in trainer.loggers:
            logger.log_metrics(row, step=self.step)
            logger.save()
        console.print(self._line(trainer))

    def summary(self) -> dict[str, float | None]:
        """Of the last validation: nats per token, and bits per byte; None before it."""
        return {"val_loss": self.loss, "bits_per_byte": self.bits_per_byte}

    def _line(self, trainer: L.Trainer) -> str:
        parts = [step_text(trainer, self.step)]
        row = latest_row(trainer)
        if "train/loss" in row:
            parts.append(f"train loss {row['train/loss']:.3f}")
        parts.append(f"val loss {self.loss:.3f}")
        parts.append(f"{self.bits_per_byte:.3f} bits per byte")
        if "throughput/tokens_per_s" in row:
            parts.append(f"{row['throughput/tokens_per_s']:,.0f} tokens/s")
        return "  ".join(parts)


def step_text(trainer: L.Trainer, step: int) -> str:
    return f"step {step:>{len(str(trainer.max_steps))}}/{trainer.max_steps}"


class ProgressBar(L.Callback):
    """Optimizer steps, loss and time left; shown on a terminal only."""

    def __init__(self) -> None:
        self._bar: Progress | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("", total=trainer.max_steps, loss="")
        self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        if self._bar is not None:
            loss = latest_row(trainer).get("train/loss")  # a number already: nothing waits for it
            self._bar.update(
                self._task,
                completed=trainer.global_step,
                loss="" if loss is None else f"loss {loss:.3f}",
            )

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: L.Trainer, pl_module, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def latest_row(trainer: L.Trainer) -> dict[str, float]:
    """The last row of training metrics; empty before the first."""
    found = [c.latest for c in trainer.callbacks if isinstance(c, MetricsCallback)]
    return found[0] if found else {}
