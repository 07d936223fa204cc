"""Peaks measured point by point: what is written when, and what a failure becomes."""

import csv
import errno
from dataclasses import replace

import pytest
import torch

from scripts import measure_memory
from scripts.check_prediction import of_table
from scripts.common.ending import ended
from training.devices import resolve_hardware
from training.units import GIB


@pytest.fixture
def trials(monkeypatch):
    """Stands in for a GPU and its processes: 1 GiB at 32 tokens, 2 GiB at 64; 96 is out of memory,
    128 crashes, 160 is when Ctrl-C comes."""

    class Runner:
        def __init__(self, folder):
            assert folder.is_dir()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            """Nothing is left behind."""

        def run(self, job, log):
            n = job["seq_len"]
            if n == 160:
                raise KeyboardInterrupt
            if n > 64:
                return {"status": "oom" if n == 96 else "error", "message": "no room"}
            return {"status": "ok", "allocated_bytes": n // 32 * GIB, "reserved_bytes": 3 * GIB}

    def gpu(device, precision):
        return replace(resolve_hardware("cpu", precision), device="cuda")

    monkeypatch.setattr(measure_memory, "ProbeRunner", Runner)
    monkeypatch.setattr(measure_memory, "resolve_hardware", gpu)


def rows_of(file):
    return list(csv.DictReader(file.open()))


def test_every_combination_is_a_row_that_the_comparison_reads(trials, tmp_path):
    out = tmp_path / "new" / "memory.csv"
    assert measure_memory.main(["seq_len=32,64,96", "attention=naive", f"--out={out}"]) == 0
    assert [row["status"] for row in rows_of(out)] == ["ok", "ok", "oom"]
    assert [row["peak_reserved_bytes"] for row in rows_of(out)] == [str(3 * GIB), str(3 * GIB), ""]
    found = [(cfg.seq_len, cfg.attention["_target_"], peak) for _, cfg, peak in of_table(out)]
    naive = "flash_attention.NaiveAttention"
    assert found == [(32, naive, GIB), (64, naive, 2 * GIB), (96, naive, None)]


def test_the_config_is_of_one_sequence_as_the_step_is(trials):
    typed, cfg = measure_memory.point(["seq_len=32"])
    assert typed == "seq_len=32 global_batch_tokens=32 micro_batch_tokens=1"
    assert (cfg.global_batch_tokens, cfg.micro_batch_tokens) == (32, 1)


def test_a_crash_is_a_row_and_the_exit_code(trials, tmp_path):
    out = tmp_path / "memory.csv"
    assert measure_memory.main(["seq_len=128,32", f"--out={out}"]) == 1
    assert [row["status"] for row in rows_of(out)] == ["error", "ok"]


def test_what_was_measured_before_an_interrupt_is_kept(trials, tmp_path, capsys):
    out = tmp_path / "memory.csv"
    assert ended(lambda: measure_memory.main(["seq_len=64,160,32", f"--out={out}"])) == 130
    assert [row["peak_allocated_bytes"] for row in rows_of(out)] == [str(2 * GIB)]
    assert capsys.readouterr().err == "\ninterrupted; what was written before stays\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["seq_len=32,-1"], "seq_len=-1"),
        (["seq_len=32", "--limit=nan"], "--limit: 'nan' is not accepted"),
        (["attention=nothing"], "attention=nothing"),
    ],
)
def test_a_bad_setting_is_refused_before_anything_is_measured(
    trials, tmp_path, capsys, arguments, said
):
    with pytest.raises(SystemExit) as stop:
        measure_memory.main([*arguments, f"--out={tmp_path / 'memory.csv'}"])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_disk_that_becomes_full_is_one_sentence(trials, tmp_path, monkeypatch, capsys):
    write, out = measure_memory.write, tmp_path / "memory.csv"

    def full(rows, path):
        if rows:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(rows, path)

    monkeypatch.setattr(measure_memory, "write", full)
    assert ended(lambda: measure_memory.main(["seq_len=32", f"--out={out}"])) == 1
    said = "error: no room (No space left on device); make some and run again\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_a_cpu_is_refused(device, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        measure_memory.main([f"device={device}", f"--out={tmp_path / 'memory.csv'}"])
    assert f"device={device} is the CPU here; peaks are" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
