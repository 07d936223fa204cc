"""The grid of flash_v1: the waves of its programs, and what the script writes."""

import csv

import pytest

from flash_attention import gpus
from scripts import grid_occupancy

H200 = gpus.known("h200")  # 132 processors


@pytest.mark.parametrize(
    ("head_dim", "heads", "waves"),
    # One program on a processor at D = 128, two at D = 64.
    [(128, 1, 1), (128, 132, 1), (128, 133, 2), (64, 264, 1), (64, 265, 2)],
)
def test_one_program_per_head_is_a_plateau_that_ends_with_the_processors(head_dim, heads, waves):
    row = grid_occupancy.modelled(head_dim, heads, 2048, "1", H200)
    assert (row.programs, row.waves) == (heads, waves)
    assert row.work == waves * 2048 / (128 if head_dim == 128 else 64)


def test_auto_divides_the_rows_among_idle_processors():
    row = grid_occupancy.modelled(128, 16, 2048, "auto", H200)
    assert (row.programs, row.waves, row.work) == (128, 1, 16 / 8)  # 8 splits, of 16 row blocks


def test_without_a_gpu_the_model_is_written(tmp_path, capsys):
    out = tmp_path / "grid"
    argv = ["--gpu=h200", "--no-measure", "--heads", "1", "200", f"--out={out}"]
    assert grid_occupancy.main(argv) == 0
    with open(f"{out}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2
    assert {row["ms"] for row in rows} == {""}
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")
    assert "132 processors" in capsys.readouterr().out


def test_measured_times_are_written_and_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(grid_occupancy, "timed", lambda row, rounds: 2.0)
    args = ["--gpu=h200", "--no-measure", "--heads", "4", "--head-dims", "64", "--seq-len=1024"]
    parsed = grid_occupancy.parse([*args, f"--out={tmp_path / 'grid'}"])
    parsed.measure = True
    monkeypatch.setattr(grid_occupancy, "parse", lambda argv: parsed)
    assert grid_occupancy.main([]) == 0
    with open(tmp_path / "grid.csv", newline="") as file:
        row = next(csv.DictReader(file))
    # 4 heads, two products of 2 N^2 D FLOPs each, in 2 ms.
    assert float(row["tflops"]) == pytest.approx(4 * 2 * 2 * 1024**2 * 64 / 2e-3 / 1e12)


def test_a_length_beyond_a_million_is_refused(capsys):
    with pytest.raises(SystemExit):
        grid_occupancy.parse(["--gpu=h200", "--seq-len", "100000000"])
    assert "'100000000' is not accepted; give an integer from 1 to" in capsys.readouterr().err


def test_a_bad_gpu_is_refused(capsys):
    with pytest.raises(SystemExit):
        grid_occupancy.parse(["--gpu=tpu"])
    assert "--gpu" in capsys.readouterr().err
