import os
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from training.checkpoint import AtomicCheckpointIO, RandomState, SaveCheckpoint


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(1))]


def test_random_numbers_go_on_where_they_were(tmp_path):
    before = RandomState()
    torch.save(before.state_dict(), tmp_path / "state")
    expected = draw()

    after = RandomState()
    after.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    draw()  # what starting up uses
    after.on_train_batch_start(None, None, None, 0)
    assert draw() == expected


def test_random_numbers_are_set_back_only_once():
    state = RandomState()
    state.load_state_dict(state.state_dict())
    state.on_train_batch_start(None, None, None, 0)
    first = draw()
    state.on_train_batch_start(None, None, None, 1)
    assert draw() != first


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "new" / "last.ckpt"
    io = AtomicCheckpointIO()
    io.save_checkpoint({"step": 1}, path)

    def cut_off(checkpoint, file):
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", cut_off)
    with pytest.raises(OSError, match="no space"):
        io.save_checkpoint({"step": 2}, path)
    assert torch.load(path, weights_only=True) == {"step": 1}


def test_a_checkpoint_is_on_disk_before_it_has_its_name(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b)))
    AtomicCheckpointIO().save_checkpoint({}, tmp_path / "last.ckpt")
    assert calls == ["fsync", "rename"]


class FakeTrainer(SimpleNamespace):
    """Counts like a Trainer that accumulates two micro-batches; notes when it saves."""

    def __init__(self, max_steps, val_every, start=0):
        super().__init__(
            global_step=start,
            max_steps=max_steps,
            accumulate_grad_batches=2,
            val_check_batch=2 * val_every,
            enable_validation=True,
            state=SimpleNamespace(fn="fit"),
            saved=[],
        )
        self.moment = ""

    def save_checkpoint(self, path):
        self.saved.append(f"{self.moment} {self.global_step}")

    def fit(self, callback):
        callback.on_train_start(self, None)
        for batch in range(2 * self.global_step, 2 * self.max_steps):
            self.global_step = (batch + 1) // 2
            self.moment = "step"
            callback.on_train_batch_end(self, None, None, None, batch)
            if (batch + 1) % self.val_check_batch == 0:
                self.moment = "validation"
                callback.on_validation_end(self, None)
        return self.saved


def test_saves_after_the_validation_of_the_same_step_and_at_the_end():
    saved = FakeTrainer(max_steps=7, val_every=4).fit(SaveCheckpoint("x", every_n_steps=2))
    assert saved == ["step 2", "validation 4", "step 6", "step 7"]


def test_a_resumed_run_does_not_save_amid_an_accumulation():
    saved = FakeTrainer(max_steps=5, val_every=9, start=2).fit(SaveCheckpoint("x", 2))
    assert saved == ["step 4", "step 5"]
