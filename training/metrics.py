"""The one place where training metrics are measured and logged."""

import math
import statistics
from typing import Any

import lightning as L
import torch
from torch import Tensor

from training import memory, out_of_memory, throughput
from training.memory_parts import memory_parts
from training.units import GIB


class MetricsCallback(L.Callback):
    """Logs loss, learning rate, gradient norm, tokens, speed and memory of training.

    A row goes to every logger of the Trainer after the run's first optimizer step, after every step
    that ``log_every_n_steps`` divides and after the last one. Nothing waits for the device between
    rows, validations and checkpoints.

    The summary also says what the memory is made of, how much of it there was before the forward
    pass of the first step after the warm-up (parameters, gradients, optimizer), and, of a run that
    ran out of memory, what was being allocated.

    Speed leaves out validation, checkpoints and the first ``warmup_steps`` steps of this process
    (kernels are compiled, the optimizer's state is made). Memory peaks start anew with the step
    after these, if there is one; the peaks of a shorter run are those of all its steps.

    Args:
        log_every_n_steps: optimizer steps between rows.
        warmup_steps: optimizer steps of this process before speed and peaks are measured.

    Attributes:
        latest: the last row logged.
    """

    def __init__(self, log_every_n_steps: int = 10, warmup_steps: int = 2) -> None:
        if log_every_n_steps < 1:
            raise ValueError(f"log_every_n_steps={log_every_n_steps} must be at least 1")
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps={warmup_steps} must be at least 0")
        self.log_every_n_steps = log_every_n_steps
        self.warmup_steps = warmup_steps
        self.latest: dict[str, float] = {}

        # Of the whole run: a resume goes on with these.
        self._steps = 0
        self._tokens = 0
        self._first_loss: float | None = None
        # Since the last row: the sum of the steps' losses, and how many steps.
        self._row_loss: Tensor | float = 0.0
        self._row_steps = 0
        # Of the step that is not finished yet.
        self._step_loss: Tensor | float = 0.0
        self._step_tokens = 0
        # Of this process.
        self._device = torch.device("cpu")
        self._watch = throughput.Stopwatch(self._device)
        self._steps_here = 0
        self._measuring = False  # the warm-up is over
        self._timed_tokens = 0  # since the watch's last lap
        self._lr = 0.0
        self._saved: memory.SavedBytes | None = None
        self._speeds: list[float] = []  # tokens/s of each row
        self._mfus: list[float] = []
        self._last_loss: float | None = None
        self._peaks: dict[str, int] = {}
        self._parts: dict[str, int] | None = None
        self._before_forward: int | None = None
        self._oom: dict[str, Any] = {}

    # What is measured, in the order in which it happens.

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = trainer.global_step
        self._device = pl_module.device
        self._watch = throughput.Stopwatch(self._device)
        self._peak_flops = throughput.peak_flops(
            throughput.device_name(self._device), throughput.product_format(trainer.precision)
        )

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._saved is None:
            self._count_saved(trainer, pl_module, batch["tokens"])
        if self._steps_here >= self.warmup_steps:
            if not self._measuring:
                self._measuring = True
                memory.reset_peaks(self._device)
                self._before_forward = memory.current(self._device)
            self._watch.start()  # it stands after a validation or a checkpoint

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        # By the end of the batch the scheduler has already set the next step's.
        self._lr = optimizer.param_groups[0]["lr"]

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        # Lightning has divided the loss by the number of micro-batches: their sum is the mean.
        self._step_loss = self._step_loss + outputs["loss"]
        n_sequences, length = batch["tokens"].shape
        self._step_tokens += n_sequences * (length - 1)
        if trainer.global_step > self._steps:
            self._end_step(trainer, pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._watch.pause()

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._watch.pause()

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._row_steps:
            self._log_row(trainer, pl_module)
        self._peaks = memory.peaks(self._device)

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._peaks = memory.peaks(self._device)
        if memory.is_out_of_memory(exception):  # now: the Trainer goes on to free the model
            self._oom = out_of_memory.describe(exception, self._device)

    # What is kept over a resume.

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "tokens": self._tokens,
            "first_loss": self._first_loss,
            "row_loss": float(self._row_loss),
            "row_steps": self._row_steps,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._steps = state_dict["steps"]
        self._tokens = state_dict["tokens"]
        self._first_loss = state_dict["first_loss"]
        self._row_loss = state_dict["row_loss"]
        self._row_steps = state_dict["row_steps"]

    def summary(self) -> dict[str, Any]:
        """The run in numbers; None for what was not measured or is not finite.

        Keys: ``train_loss_first`` (of step 1) and ``train_loss_last`` (the last row's: the mean of
        the steps since the row before), both in nats per token, ``tokens_per_s`` and ``mfu``
        (medians of the rows), ``peak_allocated_bytes`` and ``peak_reserved_bytes`` (GPU),
        ``peak_rss_bytes`` (CPU), ``saved_attention_bytes`` and ``saved_total_bytes`` (of one
        micro-batch), ``memory_before_forward_bytes`` (allocated on a GPU, else resident),
        ``memory_parts_bytes`` (by part, see ``training.memory_parts``), ``steps`` and
        ``tokens`` (of the whole run, resumes included); after an out-of-memory also what
        ``training.out_of_memory.describe`` says.
        """
        return {
            "train_loss_first": _finite(self._first_loss),
            "train_loss_last": _finite(self._last_loss),
            "tokens_per_s": statistics.median(self._speeds) if self._speeds else None,
            "mfu": statistics.median(self._mfus) if self._mfus else None,
            "peak_allocated_bytes": self._peaks.get("allocated"),
            "peak_reserved_bytes": self._peaks.get("reserved"),
            "peak_rss_bytes": self._peaks.get("rss"),
            "saved_attention_bytes": self._saved.attention if self._saved else None,
            "saved_total_bytes": self._saved.total if self._saved else None,
            "memory_before_forward_bytes": self._before_forward,
            "memory_parts_bytes": self._parts,
            "steps": self._steps,
            "tokens": self._tokens,
            **self._oom,
        }

    def _count_saved(
        self, trainer: L.Trainer, pl_module: L.LightningModule, tokens: Tensor
    ) -> None:
        self._saved = memory.saved_for_backward(
            pl_module.model,
            tokens,
            loss_fn=pl_module.loss_fn,
            precision=trainer.precision_plugin.forward_context(),
        )
        self._parts = memory_parts(pl_module.model, trainer.optimizers[0], self._saved)
        self._flops_per_token = pl_module.model.flops_per_token(tokens.size(1) - 1)
        if self._device.type == "cpu":
            memory.check_fits_in_ram(self._saved, tokens[:, 1:].numel())

    def _end_step(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = trainer.global_step
        self._tokens += self._step_tokens
        if self._measuring:
            self._timed_tokens += self._step_tokens
        self._row_loss = self._row_loss + self._step_loss
        self._row_steps += 1
        self._step_loss, self._step_tokens = 0.0, 0
        self._steps_here += 1
        if self._steps == 1 or self._steps % self.log_every_n_steps == 0:
            self._log_row(trainer, pl_module)

    def _log_row(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._last_loss = float(self._row_loss) / self._row_steps
        if self._first_loss is None:
            self._first_loss = self._last_loss
        self._row_loss, self._row_steps = 0.0, 0
        self._peaks = memory.peaks(self._device)
        row = {
            "train/loss": self._last_loss,
            "train/lr": self._lr,
            "train/grad_norm": float(pl_module.grad_norm),
            "train/tokens": self._tokens,
            **self._speed(),
            **{_PEAK_KEYS[name]: value / GIB for name, value in self._peaks.items()},
            "memory/saved_attention_gib": self._saved.attention / GIB,
            "memory/saved_total_gib": self._saved.total / GIB,
        }
        self.latest = row
        for logger in trainer.loggers:
            logger.log_metrics(row, step=self._steps)
            logger.save()  # a killed run keeps its rows

    def _speed(self) -> dict[str, float]:
        """Speed since the last row, without the warm-up; nothing if that leaves nothing."""
        seconds, tokens = self._watch.lap(), self._timed_tokens
        self._timed_tokens = 0
        if not tokens:
            return {}
        speed = tokens / seconds
        self._speeds.append(speed)
        mfu = throughput.mfu(speed, self._flops_per_token, self._peak_flops)
        if mfu is None:
            return {"throughput/tokens_per_s": speed}
        self._mfus.append(mfu)
        return {"throughput/tokens_per_s": speed, "throughput/mfu": mfu}


_PEAK_KEYS = {
    "allocated": "memory/peak_allocated_gib",
    "reserved": "memory/peak_reserved_gib",
    "rss": "memory/peak_rss_gib",
}


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
