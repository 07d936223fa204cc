"""Recall accuracy of models made by hand, through a real validation."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn

from data.recall import Recall
from training.recall import RecallAccuracy

LAG, SYMBOLS = 24, 4


class LooksBack(nn.Module):
    """Predicts the token that stood ``distance`` before; with a distance of 0, always "a"."""

    def __init__(self, distance):
        super().__init__()
        self.distance = distance

    def forward(self, idx):
        seen = idx.roll(self.distance - 1, dims=1) if self.distance else torch.full_like(idx, 97)
        return nn.functional.one_hot(seen, 256).float()


class Validated(L.LightningModule):
    def __init__(self, distance):
        super().__init__()
        self.model = LooksBack(distance)

    def validation_step(self, batch, batch_idx): ...


class Log(L.pytorch.loggers.Logger):
    name, version = "log", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *args, **kwargs): ...


def validate(data, distance, times=1):
    callback, log = RecallAccuracy(), Log()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=log,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    for _ in range(times):
        trainer.validate(Validated(distance), data, verbose=False)
    return callback, log


@pytest.fixture
def data(tmp_path):
    """Makes validation batches of two sequences, the last of one."""

    def make(seq_len, corpus=None):
        corpus = corpus or Recall(LAG, SYMBOLS, 5, 20_001, 0)
        stream = torch.frombuffer(bytearray(corpus.stream()), dtype=torch.uint8).long()
        n = len(stream) // seq_len - 1
        rows = [stream[i * seq_len : (i + 1) * seq_len + 1] for i in range(n - 1 + n % 2)]
        module = L.LightningDataModule()
        module.corpus = corpus
        module.val_dataloader = lambda: torch.utils.data.DataLoader(
            [{"tokens": row} for row in rows], batch_size=2
        )
        return module

    return make


@pytest.mark.parametrize("seq_len", [LAG, 37, 4 * LAG])
def test_who_sees_the_lag_recalls_everything(data, seq_len, capsys):
    callback, log = validate(data(seq_len), LAG)
    assert callback.accuracy == 1.0
    assert callback.summary() == {
        "recall_accuracy": 1.0,
        "recall_chance": 0.25,
        "recall_symbols": callback.n_symbols,
        "recall_lag": LAG,
    }
    assert callback.n_symbols > 20
    assert {"val/recall_accuracy": 1.0, "val/recall_chance": 0.25} in log.rows
    assert "recall accuracy 1.000 of" in capsys.readouterr().out


@pytest.mark.parametrize("seq_len", [LAG - 1, 4 * LAG])
def test_who_always_says_the_same_is_right_by_chance(data, seq_len):
    callback, _ = validate(data(seq_len), 0)
    error = (0.25 * 0.75 / callback.n_symbols) ** 0.5
    assert callback.n_symbols > 1000
    assert callback.accuracy == pytest.approx(0.25, abs=4 * error)


def test_batches_are_weighted_by_the_symbols_that_count(data):
    made = data(37)
    callback, _ = validate(made, 0)
    right = counted = 0
    for batch in made.val_dataloader():
        where = made.corpus.counted(batch["tokens"])
        answers = batch["tokens"][:, 1:][where]
        right, counted = right + int((answers == 97).sum()), counted + len(answers)
    assert callback.accuracy == right / counted


def test_each_validation_counts_anew(data):
    once, twice = (validate(data(37), 0, times=times)[0] for times in (1, 2))
    assert (twice.n_symbols, twice.accuracy) == (once.n_symbols, once.accuracy)


def test_another_corpus_has_no_recall(data, capsys):
    made = data(37)
    made.corpus = SimpleNamespace(name="pysource")
    callback, log = validate(made, LAG)
    assert callback.summary() == {}
    assert not [row for row in log.rows if row]
    assert "recall" not in capsys.readouterr().out


def test_a_validation_without_a_symbol_that_counts_has_no_accuracy(data):
    made = data(37, Recall(LAG, SYMBOLS, 5, 200, 0))
    made.val_dataloader = lambda: torch.utils.data.DataLoader(
        [{"tokens": torch.full((38,), ord("."))}], batch_size=1
    )
    callback, _ = validate(made, LAG)
    assert callback.summary()["recall_accuracy"] is None
