"""Predictions on the command line, and their comparison with measurements."""

import csv
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import check_prediction, predict_memory
from training import predict
from training.memory_names import PARTS
from training.units import GIB

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def by_hand(monkeypatch):
    """A peak of 2 GiB and of 1 GiB for each 1024 tokens; the lengths and precisions asked for."""
    asked = []

    def peak(cfg):
        asked.append((cfg.seq_len, cfg.precision))
        parts = dict.fromkeys(PARTS, 0) | {"parameters": 2 * GIB, "mlp": cfg.seq_len * 2**20}
        return SimpleNamespace(peak_bytes=sum(parts.values()), parts=parts)

    monkeypatch.setattr(predict, "predict_peak", peak)
    return asked


def printed(capsys) -> list[list[str]]:
    """The table's cells, the heading above it left out."""
    lines = capsys.readouterr().out.splitlines()[1:]
    return [re.split(r"\s{2,}", line.strip()) for line in lines]


def test_it_prints_the_peak_its_parts_and_the_longest_length(by_hand, capsys):
    assert predict_memory.main(["seq_len=2048", "--card", "10"]) == 0
    rows = dict(printed(capsys))
    assert rows["peak allocated"] == "4.000"
    assert (rows["parameters"], rows["the MLPs"], rows["gradients"]) == ("2.000", "2.000", "0")
    assert rows["longest seq_len in 10 GiB"] == "8,192"


def test_lists_of_values_make_a_row_for_each_combination(by_hand, capsys):
    arguments = ["seq_len=1024,2048", "attention=naive,sdpa", "--no-longest", "seed=1"]
    assert predict_memory.main(arguments) == 0
    headings, *rows = printed(capsys)
    assert headings[:2] == ["peak allocated", "parameters"]
    assert [row[:3] for row in rows] == [
        ["seq_len=1024 attention=naive", "3.000", "2.000"],
        ["seq_len=1024 attention=sdpa", "3.000", "2.000"],
        ["seq_len=2048 attention=naive", "4.000", "2.000"],
        ["seq_len=2048 attention=sdpa", "4.000", "2.000"],
    ]
    assert not any("longest" in heading for heading in headings)


def test_on_a_terminal_a_bar_says_what_is_worked_out_and_goes(by_hand, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    assert predict_memory.main(["seq_len=1024,2048"]) == 0
    said = capsys.readouterr()
    assert "seq_len=2048 longest seq_len" in said.err
    assert "━" in said.err
    assert said.err.endswith("\x1b[2K")  # the bar's line is erased
    assert "━" not in said.out


def test_in_a_file_there_is_no_bar(by_hand, monkeypatch, capsys):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    assert predict_memory.main(["seq_len=1024,2048"]) == 0
    assert capsys.readouterr().err == ""


def test_a_card_has_a_name(by_hand, capsys):
    assert predict_memory.main(["--card=rtx4090", "--multiple=1024"]) == 0
    (label,) = (row[0] for row in printed(capsys) if "longest" in row[0])
    assert label.endswith("22.9 GiB (rtx4090: 23.5, less 0.6 for CUDA itself)")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--card=h9000"], "--card=h9000 is not accepted; give one of t4, "),
        (["--card=-1"], "--card=-1 is not accepted"),
        (["--multiple=0"], "--multiple: '0' is not accepted; give an integer of at least 1"),
        (["seq_lem=3"], "there is no key seq_lem; did you mean seq_len?"),
        (["attention=flash_v9"], "attention=flash_v9 is no choice; give one of flash_v1, flash_v2"),
        (["model.width=7"], "model.n_head=4 does not divide model.width=7"),
        (["tokenizer=pretrained"], "tokenizer.name is not set"),
    ],
)
def test_what_cannot_be_predicted_is_refused_in_a_sentence(arguments, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        predict_memory.main(arguments)
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_it_runs_as_a_file_from_anywhere(tmp_path):
    command = [sys.executable, str(ROOT / "scripts" / "predict_memory.py"), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The comparison


def table(out: Path) -> list[dict[str, str]]:
    with open(f"{out}.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_a_table_of_measured_peaks_is_compared_row_by_row(by_hand, tmp_path, capsys):
    source = tmp_path / "measured.csv"
    source.write_text(
        "attention,seq_len,precision,model.n_layer,tokens_per_step,peak_allocated_gib,status\n"
        "naive,2048,32-true,2,4096,5.0,ok\n"
        "flash_v1,1024,bf16-mixed,,,2.5,\n"
        "flash_v1,4096,bf16-mixed,,,2.0,oom\n"  # what was allocated then is no peak
        "flash_v1,4096,bf16-mixed,,,,refused\n"
    )
    out = tmp_path / "new" / "prediction"
    assert check_prediction.main([str(source), f"--out={out}"]) == 0
    rows = table(out)
    assert [(row["measured_gib"], row["predicted_gib"], row["ratio"]) for row in rows] == [
        ("5.000", "4.000", "0.800"),
        ("2.500", "3.000", "1.200"),
        ("out of memory", "6.000", ""),
    ]
    assert "model.n_layer=2" in rows[0]["run"]
    assert "global_batch_tokens=4096" in rows[0]["run"]
    assert by_hand == [(2048, "32-true"), (1024, "bf16-mixed"), (4096, "bf16-mixed")]
    assert "| 2.500 | 3.000 | 1.200 |" in Path(f"{out}.md").read_text()
    said = capsys.readouterr().out
    assert said.count("run  measured_gib  predicted_gib  ratio") == 1
    assert "2 runs, largest error 20.0%; 1 out of memory" in said


def test_runs_are_predicted_from_the_config_in_their_folder(by_hand, tmp_path):
    for name, peak in (("0_a", 4 * GIB), ("1_on_a_cpu", None)):
        folder = tmp_path / "sweep" / name
        (folder / ".hydra").mkdir(parents=True)
        summary = {"status": "ok", "precision": "32-true", "peak_allocated_bytes": peak}
        (folder / "summary.json").write_text(json.dumps(summary))
        (folder / ".hydra" / "config.yaml").write_text("seq_len: 2048\nprecision: auto\n")
    out = tmp_path / "prediction"
    assert check_prediction.main([str(tmp_path / "sweep"), f"--out={out}"]) == 0
    (row,) = table(out)
    assert (row["run"], row["ratio"]) == ("0_a", "1.000")
    assert by_hand == [(2048, "32-true")]


def test_a_row_that_no_run_can_be_is_refused_in_a_sentence(tmp_path, capsys):
    source = tmp_path / "measured.csv"
    source.write_text("attention,seq_len,peak_allocated_gib\nnothing,2048,5.0\n")
    with pytest.raises(SystemExit) as stop:
        check_prediction.main([str(source), f"--out={tmp_path / 'out'}"])
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert f"SOURCE={source}: " in said
    assert "attention=nothing" in said
    assert "Traceback" not in said


def test_a_source_without_a_measured_gpu_is_refused(by_hand, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for source, sentence in (("nowhere", "does not exist"), ("empty", "no SOURCE holds a peak")):
        with pytest.raises(SystemExit):
            check_prediction.main([str(tmp_path / source)])
        assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("peak", ["inf", "-1", "nan"])
def test_a_peak_that_no_gpu_can_have_is_refused(tmp_path, capsys, peak):
    source = tmp_path / "points.csv"
    source.write_text(f"attention,seq_len,peak_allocated_gib\nflash_v1,64,{peak}\n")
    with pytest.raises(SystemExit) as stop:
        check_prediction.main([str(source), f"--out={tmp_path / 'out'}"])
    assert stop.value.code == 2
    assert f"SOURCE={source}: a peak of {float(peak) * 2**30}" in capsys.readouterr().err
    assert not (tmp_path / "out.csv").exists()
