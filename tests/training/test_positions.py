"""Loss by position: buckets, documents, and a validation of a real GPT."""

import csv
import math
from types import SimpleNamespace

import lightning as L
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flash_attention import NaiveAttention
from models.gpt import GPT
from models.lit_gpt import LitGPT
from models.optim import AdamWCosine
from training.positions import LossByPosition, PositionSums, edges, own_context

EOT = 9


@pytest.mark.parametrize(
    ("seq_len", "expected"),
    [
        (128, [(0, 127)]),
        (129, [(0, 127), (128, 128)]),
        (512, [(0, 127), (128, 255), (256, 511)]),
        (600, [(0, 127), (128, 255), (256, 511), (512, 599)]),
    ],
)
def test_buckets_double(seq_len, expected):
    assert edges(seq_len, 128) == expected


def test_own_context_counts_back_to_the_end_of_the_document_before():
    tokens = torch.tensor([[5, 5, EOT, 5, 5, EOT, EOT, 5], [EOT, 5, 5, 5, 5, 5, 5, EOT]])
    assert own_context(tokens, EOT).tolist() == [[1, 2, 0, 1, 2, 0, 0], [0, 1, 2, 3, 4, 5, 6]]


def test_sums_over_batches_of_different_size_are_the_direct_means():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(10, (7, 22), generator=generator)  # each tenth token ends a document
    losses = torch.rand(7, 21, generator=generator) * 5
    sums = PositionSums(seq_len=21, first=4, eot=EOT, device=torch.device("cpu"))
    for rows in (slice(0, 4), slice(4, 6), slice(6, 7)):
        sums.add(losses[rows], tokens[rows])
    found = sums.buckets(torch.tensor([1, 4, 5, 9, 30]))
    assert [(b.first, b.last) for b in found] == [(0, 3), (4, 7), (8, 15), (16, 20)]
    assert [b.documents_longer for b in found] == [5, 3, 2, 1]
    for b in found:
        every, own = [], []
        for row, loss in zip(tokens.tolist(), losses.tolist(), strict=True):
            for p in range(b.first, b.last + 1):
                every.append(loss[p])
                if EOT not in row[max(0, p + 1 - b.first) : p + 1]:
                    own.append(loss[p])
        assert b.tokens == len(every)
        assert b.loss == pytest.approx(np.mean(every))
        assert b.tokens_own == len(own)
        assert b.loss_own == (pytest.approx(np.mean(own)) if own else None)
    assert found[1].tokens_own > 0


def test_a_bucket_whose_loss_is_not_finite_has_none():
    sums = PositionSums(seq_len=4, first=2, eot=EOT, device=torch.device("cpu"))
    sums.add(torch.tensor([[1.0, math.inf, 2.0, 4.0]]), torch.zeros(1, 5, dtype=torch.long))
    assert [b.loss for b in sums.buckets(torch.tensor([5]))] == [None, 3.0]


class Rows(L.pytorch.loggers.Logger):
    """Keeps what it is given."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows, self.images = [], {}

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *args, **kwargs): ...

    def log_image(self, key, images):
        self.images[key] = images


class Data(L.LightningDataModule):
    """Five rows of 12 random tokens and their successors."""

    tokenizer = SimpleNamespace(eot=EOT)

    def __init__(self, seq_len=12, corpus=None):
        super().__init__()
        self.seq_len = seq_len
        self.corpus = corpus
        self.rows = torch.randint(10, (5, seq_len + 1), generator=torch.Generator().manual_seed(0))

    def val_dataloader(self):
        return DataLoader([{"tokens": row} for row in self.rows], batch_size=2)

    def val_document_lengths(self):
        return torch.tensor([3, 4, 6])


def validate(callback, data):
    torch.manual_seed(0)
    gpt = GPT(vocab_size=10, seq_len=12, n_layer=1, n_head=2, width=8, attention=NaiveAttention())
    with torch.no_grad():
        for p in gpt.parameters():
            p.add_(0.5 * torch.randn_like(p))
    logger = Rows()
    trainer = L.Trainer(
        accelerator="cpu",
        logger=logger,
        callbacks=[callback],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.validate(LitGPT(gpt, AdamWCosine(lr=1e-2, max_steps=1)), data, verbose=False)
    return gpt, logger, trainer


def test_a_validation_writes_its_losses_by_position_everywhere(tmp_path):
    data, callback = Data(), LossByPosition(tmp_path, first=3)
    gpt, logger, trainer = validate(callback, data)
    log_probs = gpt(data.rows[:, :-1]).log_softmax(-1).double()
    losses = -log_probs.gather(-1, data.rows[:, 1:, None]).squeeze(-1).detach()
    expected = [losses[:, a : b + 1].mean().item() for a, b in ((0, 2), (3, 5), (6, 11))]
    assert np.ptp(expected) > 0.01

    summary = callback.summary()["loss_by_position"]
    assert [b["loss"] for b in summary] == pytest.approx(expected, rel=1e-5)
    whole = sum(b["loss"] * b["tokens"] for b in summary) / sum(b["tokens"] for b in summary)
    assert whole == pytest.approx(trainer.callback_metrics["val/loss"].item(), rel=1e-5)
    assert [b["documents_longer"] for b in summary] == [3, 2, 0]
    with open(tmp_path / "loss_by_position.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [b["loss"] for b in summary]
    (row,) = [row for row in logger.rows if "val/loss_at/3-5" in row]
    assert row["val/loss_at/6-11"] == summary[2]["loss"]
    assert row["val/loss_at_own/0-2"] == summary[0]["loss_own"] == summary[0]["loss"]
    path = tmp_path / "loss_by_position.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert logger.images == {"val/loss_by_position": [str(path)]}


@pytest.mark.parametrize(
    ("first", "corpus"), [(12, None), (3, SimpleNamespace(targets=lambda tokens: None))]
)
def test_one_bucket_or_a_corpus_that_counts_few_tokens_leaves_nothing(tmp_path, first, corpus):
    callback = LossByPosition(tmp_path, first=first)
    _, logger, _ = validate(callback, Data(corpus=corpus))
    assert callback.summary() == {}
    assert not list(tmp_path.iterdir())
    assert not logger.images
    assert not any(key.startswith("val/loss_at") for row in logger.rows for key in row)


def test_a_first_bucket_without_positions_is_refused(tmp_path):
    with pytest.raises(ValueError, match="first=0 must be at least 1"):
        LossByPosition(tmp_path, first=0)
