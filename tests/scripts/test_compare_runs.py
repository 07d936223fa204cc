"""Runs compared after the fact: the report of a sweep from run folders and sweep folders."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from scripts import compare_runs, context_gain
from training.plots import PLOTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path):
    """A sweep of 11 jobs and a run of its own."""

    def make(folder: Path, n: int) -> None:
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(
            f'{{"status": "ok", "attention": "naive", "model": "tiny", "seq_len": {n}}}'
        )

    for number in range(11):
        make(tmp_path / "sweep" / f"{number}_x", 64 + number)
    make(tmp_path / "alone", 1)
    (tmp_path / "sweep" / "sweep.md").touch()
    return tmp_path


def rows(folder: Path) -> list[dict]:
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_it_reports_sweeps_and_runs_in_the_order_of_their_jobs(runs, capsys):
    out = runs / "out"
    sources = [str(runs / "sweep"), str(runs / "alone"), str(runs / "sweep" / "3_x")]
    assert compare_runs.main([*sources, f"--out={out}"]) == 0
    lengths = [int(row["seq_len"]) for row in rows(out)]
    assert lengths == [*range(64, 75), 1]  # 10 after 9, and no run twice
    assert {path.name for path in out.iterdir()} == {"sweep.csv", "sweep.md", *PLOTS}
    assert "longest seq_len that trained with naive: 74" in capsys.readouterr().out


def test_a_folder_without_a_run_is_refused(runs, capsys):
    (runs / "empty").mkdir()
    with pytest.raises(SystemExit) as stop:
        compare_runs.main([str(runs / "alone"), str(runs / "empty"), f"--out={runs / 'out'}"])
    assert stop.value.code == 2
    assert f"DIR={runs / 'empty'} has no summary.json in or below it" in capsys.readouterr().err
    assert not (runs / "out").exists()


@pytest.mark.parametrize("script", [compare_runs, context_gain])
@pytest.mark.parametrize("bad", [b"[]", b"{", b"\xff\xfe", b'{"seq_len": 3}'])
def test_a_summary_that_no_run_wrote_is_refused(runs, capsys, script, bad):
    summary = runs / "alone" / "summary.json"
    summary.write_bytes(bad)
    with pytest.raises(SystemExit) as stop:
        script.main([str(runs / "alone"), f"--out={runs / 'out'}"])
    assert stop.value.code == 2
    assert f"error: {summary} is " in capsys.readouterr().err


def test_it_runs_as_a_file_from_anywhere(tmp_path):
    script = ROOT / "scripts" / "compare_runs.py"
    done = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "--out" in done.stdout
