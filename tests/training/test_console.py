import math
from types import SimpleNamespace

import pytest
import torch

from training.console import ValidationReport
from training.metrics import MetricsCallback


class Log:
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append((step, metrics))

    def save(self):
        pass


@pytest.fixture
def trainer():
    metrics = MetricsCallback()
    metrics.latest = {"train/loss": 2.0, "throughput/tokens_per_s": 12345.6}
    return SimpleNamespace(
        global_step=7,
        max_steps=100,
        callback_metrics={"val/loss": torch.tensor(2 * math.log(2))},
        datamodule=SimpleNamespace(bytes_per_token=4.0),
        loggers=[Log()],
        callbacks=[metrics],
    )


def test_bits_per_byte_are_the_bits_of_a_token_over_its_bytes(trainer):
    report = ValidationReport()
    report.on_validation_end(trainer, None)
    assert report.summary()["bits_per_byte"] == pytest.approx(2 / 4)


def test_a_validation_is_logged_at_its_step(trainer):
    ValidationReport().on_validation_end(trainer, None)
    ((step, row),) = trainer.loggers[0].rows
    assert step == 7
    assert row == pytest.approx({"val/loss": 2 * math.log(2), "val/bits_per_byte": 0.5})


def test_a_validation_is_one_line(trainer, capsys):
    ValidationReport().on_validation_end(trainer, None)
    assert capsys.readouterr().out == (
        "step   7/100  train loss 2.000  val loss 1.386  0.500 bits per byte  12,346 tokens/s\n"
    )


def test_a_validation_before_the_first_row_has_no_training_numbers(trainer, capsys):
    trainer.callbacks = []
    ValidationReport().on_validation_end(trainer, None)
    assert capsys.readouterr().out == "step   7/100  val loss 1.386  0.500 bits per byte\n"
