"""Arguments that several scripts have, and that each refuses a bad one before it measures."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch

from scripts.common import arguments


@pytest.mark.parametrize(
    ("kind", "bad", "accepted"),
    [
        ("positive", ["0", "1.5", "x"], "an integer of at least 1"),
        ("positive_number", ["0", "nan", "inf", "x"], "a number above 0"),
        ("fraction", ["1", "-0.1", "nan", "x"], "a number of at least 0 and below 1"),
        ("kernel_head_dim", ["0", "257", "x"], "an integer from 1 to 256"),
        ("length", ["0", "1048577", "100000000", "x"], "an integer from 1 to 1048576"),
        ("file_name", ["", "/", ".."], "a path that ends in a name"),
    ],
)
def test_what_is_not_accepted_is_named_beside_what_is(kind, bad, accepted):
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError) as refused:
            getattr(arguments, kind)(text)
        assert repr(text) in str(refused.value)
        assert str(refused.value).endswith(f"; give {accepted}")


def test_the_limits_of_what_is_accepted():
    assert [arguments.kernel_head_dim(text) for text in ("1", "256")] == [1, 256]
    assert [arguments.length(text) for text in ("1", "1048576")] == [1, 2**20]
    assert (arguments.positive("1"), arguments.fraction("0")) == (1, 0.0)
    assert arguments.positive_number("1e-3") == 1e-3


@pytest.mark.parametrize(
    ("gpus", "here", "not_here"),
    [
        (0, ["cpu"], ["cuda", "cuda:0", "banana", "cpu:1", "meta"]),
        (2, ["cpu", "cuda", "cuda:0", "cuda:1"], ["cuda:2", "mps", "cuda:-1", "cuda:x"]),
    ],
)
def test_a_device_is_one_that_is_here(gpus, here, not_here, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert [arguments.present_device(text) for text in here] == here
    for text in not_here:
        with pytest.raises(argparse.ArgumentTypeError, match=f"give {' or '.join(here)}$"):
            arguments.present_device(text)


def test_an_ending_leaves_the_dots_in_a_name():
    assert arguments.beside(Path("a/h200.v2"), ".csv") == Path("a/h200.v2.csv")


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_was(tmp_path):
    old = tmp_path / "old"
    old.write_text("kept")
    arguments.check_out(tmp_path, old, tmp_path / "a" / "b" / "new")
    assert old.read_text() == "kept"
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["old"]
    assert (tmp_path / "a" / "b").is_dir()


def test_a_folder_in_the_place_of_a_file_is_refused(tmp_path, capsys):
    (tmp_path / "x.csv").mkdir()
    with pytest.raises(SystemExit) as stop:
        arguments.check_out(tmp_path / "x", tmp_path / "x.csv")
    assert stop.value.code == 2
    assert capsys.readouterr().err == (
        f"error: --out={tmp_path / 'x'} cannot be written (Is a directory: {tmp_path / 'x.csv'}); "
        "give another path\n"
    )


# Each script --------------------------------------------------------------------------------------

MODEL_ALONE = ["--gpu=h200", "--no-measure"]
SCRIPTS = {  # what begins the work, and arguments without --out
    "bench_attention": ("bench_shape", ["--device=cpu", "--seq-lens=32"]),
    "check_prediction": ("of_table", ["{folder}/summary.json"]),
    "compare_runs": ("read_rows", ["{folder}"]),
    "context_gain": ("read_rows", ["{folder}"]),
    "grid_occupancy": ("modelled", MODEL_ALONE),
    "io_complexity": ("modelled", ["l2", *MODEL_ALONE]),
    "longest_context": ("Search", ["attention=naive"]),
    "measure_memory": ("measure", ["seq_len=32"]),
    "nanogpt_step": ("measure", ["{folder}", "--device=cpu"]),
    "recompute_cost": ("costed", MODEL_ALONE),
}


class BegunError(Exception):
    """The script's work has begun."""


@pytest.fixture(params=SCRIPTS)
def begin(request, tmp_path, monkeypatch):
    """f(out): calls the script with --out, to the point where its work begins."""
    script = importlib.import_module(f"scripts.{request.param}")
    work, given = SCRIPTS[request.param]
    folder = tmp_path / "given"
    folder.mkdir()
    for name in ("summary.json", "model.py"):
        (folder / name).touch()

    def begun(*_, **__):
        raise BegunError

    monkeypatch.setattr(script, work, begun)
    if request.param == "measure_memory":
        monkeypatch.setattr(script, "point", lambda overrides: ("", None))  # which needs a GPU
    return lambda out: script.main([*(a.format(folder=folder) for a in given), f"--out={out}"])


def test_out_that_cannot_be_written_is_refused_before_the_work_begins(begin, tmp_path, capsys):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    with pytest.raises(SystemExit) as stop:
        begin(out)
    assert stop.value.code == 2
    assert f"--out={out} cannot be written (" in capsys.readouterr().err


def test_a_folder_for_out_is_made(begin, tmp_path):
    with pytest.raises(BegunError):
        begin(tmp_path / "new" / "folder" / "out")
    assert (tmp_path / "new" / "folder").is_dir()


@pytest.mark.parametrize(
    ("script", "argv"),
    [
        ("bench_attention", ["--head-dims", "512"]),
        ("grid_occupancy", ["--head-dims", "512"]),
        ("io_complexity", ["--head-dim", "512", "lengths"]),
        ("recompute_cost", ["--head-dim", "512"]),
        ("show_tiling", ["--head-dim", "512", "--device=h200"]),
        ("bench_attention", ["--device", "banana"]),
        ("nanogpt_step", ["--device", "banana", "folder"]),
        ("recompute_cost", ["--device", "banana"]),
    ],
)
def test_head_dims_and_devices_that_no_kernel_has_are_refused(script, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        importlib.import_module(f"scripts.{script}").main(argv)
    assert stop.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {argv[0]}: '{argv[1]}' is not " in said
    assert "; give " in said
