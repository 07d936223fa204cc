"""The warning before a run that will not fit: when it comes, and the change it names."""

from types import SimpleNamespace

import pytest

from training import memory_warning, predict
from training.compose import composed
from training.devices import Hardware
from training.memory_warning import warn_if_too_large
from training.units import GIB

GPU = Hardware("cuda", "bf16-mixed", "a GPU")


@pytest.fixture
def predicted(monkeypatch):
    """Predictions by hand, in GiB: a sum of what the settings cost; the configs that were asked."""
    asked = []

    def peak(cfg):
        asked.append(cfg)
        sequences = max(1, cfg.micro_batch_tokens // cfg.seq_len)
        score = 100 if cfg.attention._target_.endswith("NaiveAttention") else 1
        logits = 40 if cfg.loss._target_.endswith("FullLoss") else 1
        blocks = 20 if cfg.model.activation_checkpointing == "none" else 4
        blocks -= 3 * cfg.model.offload_checkpoints
        gib = 2 + sequences * (score + logits + blocks) * cfg.seq_len / 8192
        return SimpleNamespace(peak_bytes=round(gib * GIB))

    monkeypatch.setattr(memory_warning, "predict_peak", peak)
    monkeypatch.setattr(predict, "predict_peak", peak)
    return asked


@pytest.fixture
def warned(monkeypatch, capsys):
    """What is printed on a GPU with so many GiB free."""

    def warned(free: float, *overrides: str, hardware: Hardware = GPU) -> str:
        monkeypatch.setattr(memory_warning, "free_bytes", lambda: round(free * GIB))
        warn_if_too_large(composed(["seq_len=8192", *overrides]), hardware, vocab_size=256)
        return capsys.readouterr().out

    return warned


ONE = "micro_batch_tokens=8192"


@pytest.mark.parametrize(
    ("free", "overrides", "advice"),
    [
        # 162 GiB, 63 with flash_v1, 123 with the chunked loss: the cheapest that is enough
        (64, ["attention=naive", ONE], "attention=flash_v1 would"),
        (130, ["attention=naive", ONE, "loss=full"], "attention=flash_v1 would"),
        (30, [ONE], "loss=chunked would"),
        # 84 GiB with two sequences; 124 - 80 + 2 with a chunked loss, 63 with one sequence
        (70, ["micro_batch_tokens=16384", "global_batch_tokens=16384"], "loss=chunked would"),
        (
            30,
            ["micro_batch_tokens=16384", "global_batch_tokens=16384", "loss=chunked"],
            "micro_batch_tokens=8192 would",
        ),
        (10, [ONE, "loss=chunked"], "model.activation_checkpointing=block would"),
        (
            6,
            [ONE, "loss=chunked"],
            "model.activation_checkpointing=block model.offload_checkpoints=true would",
        ),
        (
            6,
            [ONE, "loss=chunked", "model.activation_checkpointing=block"],
            "model.activation_checkpointing=block model.offload_checkpoints=true would",
        ),
        # one alone is not enough
        (24.5, ["attention=naive", ONE], "attention=flash_v1 loss=chunked would"),
        # 2 + 3 n / 8192 GiB at best: 2730 tokens, rounded down
        (3, [ONE], "seq_len=2048 micro_batch_tokens=2048 with loss=chunked model.activation_check"),
        (2.1, [ONE], "no seq_len that is a multiple of 1024"),
    ],
)
def test_the_change_it_names_is_the_cheapest_that_makes_it_fit(
    predicted, warned, free, overrides, advice
):
    text = warned(free, *overrides)
    assert f"; {advice}" in text
    assert text.count("\n") == 1  # one sentence, on one line


def test_it_names_what_is_needed_and_what_is_there(predicted, warned):
    text = warned(64, "attention=naive", ONE)
    assert "will take about 162.000 GiB and 64.000 GiB are free" in text


def test_a_run_that_fits_is_not_warned_of(predicted, warned):
    assert warned(63, ONE) == ""
    assert len(predicted) == 1


def test_the_run_s_own_precision_and_vocabulary_are_predicted(predicted, warned):
    warned(63, ONE, hardware=Hardware("cuda", "16-mixed", "a GPU"))
    (cfg,) = predicted
    assert (cfg.precision, cfg.model.vocab_size) == ("16-mixed", 256)


def test_a_cpu_run_and_one_that_switched_it_off_predict_nothing(predicted, warned):
    assert warned(0, hardware=Hardware("cpu", "32-true", "a CPU")) == ""
    assert warned(0, "predict_memory=false") == ""
    assert predicted == []


def test_a_prediction_that_fails_is_one_line(monkeypatch, warned):
    def fail(cfg):
        raise RuntimeError("no such operation\nand a second line")

    monkeypatch.setattr(memory_warning, "predict_peak", fail)
    assert warned(1) == "the memory was not predicted (RuntimeError: no such operation)\n"


def test_a_real_prediction_of_standard_attention_names_flash(warned):
    text = warned(1, "attention=naive", "model.n_layer=1", "micro_batch_tokens=1")
    assert "attention=flash_v1 would make it fit" in text
