"""Checkpoints: when they are written, how, and what they hold beside weights and optimizer."""

import os
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.fabric.plugins.io import TorchCheckpointIO
from lightning.pytorch.callbacks import Checkpoint

from training.run_folder import replacing

NAME = "last.ckpt"


class SaveCheckpoint(Checkpoint):
    """Keeps the newest checkpoint of a run, ``folder/last.ckpt``.

    Saved every ``every_n_steps`` optimizer steps and at the last one; after the validation when
    one is due at the same step, so that a resumed run neither misses nor repeats it.

    Attributes:
        about: plain values stored with it, which a resume checks before building anything.
    """

    def __init__(self, folder: str, every_n_steps: int) -> None:
        self.path = Path(folder) / NAME
        self.every_n_steps = every_n_steps
        self.about: dict[str, Any] = {}
        self._steps = 0  # optimizer steps when last looked at

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == self._steps:
            return  # gradients are being accumulated
        self._steps = trainer.global_step
        if self._due(trainer) and not self._validation_follows(trainer):
            self._save(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Not after a validation outside of training.
        if trainer.state.fn == "fit" and self._due(trainer):
            self._save(trainer)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint: dict[str, Any]) -> None:
        checkpoint["run"] = {"step": trainer.global_step, **self.about}

    def _due(self, trainer: L.Trainer) -> bool:
        step = trainer.global_step
        return step % self.every_n_steps == 0 or step == trainer.max_steps

    def _validation_follows(self, trainer: L.Trainer) -> bool:
        batches = trainer.global_step * trainer.accumulate_grad_batches
        return trainer.enable_validation and batches % trainer.val_check_batch == 0

    def _save(self, trainer: L.Trainer) -> None:
        trainer.save_checkpoint(self.path)


class RandomState(L.Callback):
    """Keeps the random number generators in the checkpoint, so that dropout goes on as it would."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        name, keys, *rest = np.random.get_state()
        return {
            "python": random.getstate(),
            "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loaded = state_dict

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        # Only now: starting up draws random numbers too.
        if self._loaded is None:
            return
        state, self._loaded = self._loaded, None
        name, keys, *rest = state["numpy"]
        random.setstate(state["python"])
        np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
        torch.set_rng_state(state["torch"])
        if state["cuda"] is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"])


class AtomicCheckpointIO(TorchCheckpointIO):
    """A checkpoint under its name is always whole, whenever the process or the machine stops.

    Lightning's own writing moves a file from the system's temporary folder, which across file
    systems is a copy and can be cut off.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path, storage_options=None) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as partial, open(partial, "wb") as file:
            torch.save(checkpoint, file)
            file.flush()
            os.fsync(file.fileno())
