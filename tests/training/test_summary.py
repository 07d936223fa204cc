import io
import json

import pytest
import torch
from hydra.errors import InstantiationException
from rich.console import Console

from data.errors import DataError
from training import loggers
from training.errors import ConfigError, DivergedError
from training.summary import RunSummary, outcome, table


def wrapped(cause: Exception) -> InstantiationException:
    error = InstantiationException("Error in call to target 'x'\nfull_key: data")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ("ok", None, 0)),
        (ConfigError("no"), ("error", "no", 2)),
        (DataError("no"), ("error", "no", 2)),
        (wrapped(DataError("no")), ("error", "no", 2)),
        (wrapped(TypeError("bad\nkey")), ("error", "data: bad key", 2)),
        (DivergedError("nan"), ("diverged", "nan", 1)),
        (MemoryError("full"), ("oom", "full", 3)),
        (torch.OutOfMemoryError("full"), ("oom", "full", 3)),
        (ValueError("one\ntwo"), ("error", "ValueError: one", 1)),
        (RuntimeError(), ("error", "RuntimeError: no message", 1)),
    ],
)
def test_an_ending_has_status_sentence_and_exit_code(error, expected):
    assert outcome(error) == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(1)])
def test_a_stop_from_outside_is_interrupted(error):
    status, sentence, code = outcome(error)
    assert (status, code) == ("interrupted", 130)
    assert "the same command with resume=last" in sentence


def test_the_file_is_written_when_a_logger_cannot_finish(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(loggers, "finish", fail)
    summary = RunSummary(tmp_path)
    with pytest.raises(OSError, match="disk full"), summary:
        raise ConfigError("no")
    assert json.loads((tmp_path / "summary.json").read_text())["error"] == "no"


def test_the_result_is_written_and_printed_before_the_loggers_finish(tmp_path, monkeypatch, capsys):
    seen = {}

    def finish(*_, **__):
        seen["file"] = json.loads((tmp_path / "summary.json").read_text())["status"]
        seen["printed"] = capsys.readouterr().err

    monkeypatch.setattr(loggers, "finish", finish)
    with RunSummary(tmp_path):
        raise DivergedError("nan")
    assert seen == {"file": "diverged", "printed": "diverged: nan\n"}


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(123_456, "0.000115 GiB"), (2**29, "0.5 GiB"), (1536 * 2**30, "1,536.000 GiB")],
)
def test_memory_of_any_size_shows_its_digits(n_bytes, text):
    values = {"n_params": 1, "device_name": "", "precision": "", "tokens_per_step": 1}
    values |= {"seq_len": 1, "run_dir": ".", "peak_rss_bytes": n_bytes}
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(table(values))
    assert text in shown.export_text()


def test_a_failed_run_finishes_its_loggers_with_its_exit_code(tmp_path, monkeypatch):
    seen = {}
    monkeypatch.setattr(loggers, "finish", lambda _, exit_code, summary: seen.update(c=exit_code))
    with RunSummary(tmp_path):
        raise DivergedError("nan")
    assert seen == {"c": 1}


def test_the_full_traceback_is_shown_when_asked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.delenv("TRAIN_SET_HYDRA_FULL_ERROR", raising=False)
    with RunSummary(tmp_path):
        raise ValueError("broken")
    assert "Traceback" in capsys.readouterr().err
