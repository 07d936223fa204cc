"""The command: variants, caps, what it writes, how it goes on after a stop."""

import csv
import errno
import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from scripts import longest_context
from scripts.common.ending import ended
from scripts.longest_context import make_variants, parse
from training import predict
from training.probe_process import ProbeRunner
from training.run_folder import held
from training.units import GIB

ROOT = Path(__file__).resolve().parents[2]

# Stands for training/probe.py: a device of 40 GiB, on which a step allocates 1 GiB and, by token,
# 1 MiB, or with naive attention 1 KiB times N. At the length in the file `hang` it waits for ever.
TRIAL = """
import os, pathlib, time
from training.probe_process import take_job
here = pathlib.Path(__file__).parent
job, tell = take_job()
n = job["seq_len"]
with open(here / "asked", "a") as file:
    file.write(f"{n}\\n")
tell(event="step", number=1)
if (here / "hang").exists() and (here / "hang").read_text() == str(n):
    (here / "pid").write_text(str(os.getpid()))
    time.sleep(60)
tell(status="ok", seconds_per_step=n * 1e-3, allocated_bytes=n * 2**20, reserved_bytes=n * 2**20)
"""
BY_HAND = {  # the largest multiples of 256 within 39, 23 and 7 GiB beside the first
    "naive": {None: 6144, 24: 4864, 8: 2560},  # N <= 6394.9, 4910.9, 2709.1
    "flash_v1": {None: 39936, 24: 23552, 8: 7168},  # N <= 39 * 1024, ...
}


class Device(ProbeRunner):
    """A device of 40 GiB, on which a step allocates 1 GiB and, by token, 1 MiB, or with naive
    attention 1 KiB times N; of ``crash`` tokens it dies."""

    asked: ClassVar[list[tuple[bool, int, int | None]]] = []
    crash: int | None = None
    kind = "cpu"

    def run(self, job, log):
        n, cap = job["seq_len"], job["cap_bytes"]
        naive = "NaiveAttention" in Path(job["config"]).read_text()
        self.asked.append((naive, n, cap))
        about = {k: job[k] for k in ("seq_len", "cap_bytes", "limit_s")} | {"device": self.kind}
        if n == self.crash:
            return about | {"status": "error", "message": "killed by SIGSEGV; last line: oh"}
        used = GIB + (n * n * 2**10 if naive else n * 2**20)
        about |= {"device_name": "a card", "capacity_bytes": cap or 40 * GIB}
        if used > (cap or 40 * GIB):
            return about | {"status": "oom", "message": "no room\nadvice"}
        peaks = {"allocated_bytes": used, "reserved_bytes": used}
        return about | peaks | {"status": "ok", "seconds_per_step": n * 1e-3}


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(longest_context, "ProbeRunner", Device)
    monkeypatch.setattr(Device, "asked", [])
    return Device


def asked(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "asked").read_text().split()]


def table(folder: Path) -> list[dict]:
    with open(folder / "longest_context.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_each_variant_gets_its_longest_length_on_each_card(device, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["attention=naive,flash_v1", "--caps", "24,none,8", f"--out={out}"]
    assert longest_context.main([*arguments, "--tolerance=0", "--start=4096"]) == 0
    rows = table(out)
    found = {
        (r["variant"], r["cap_bytes"] and int(r["cap_bytes"]) // GIB): int(r["longest_seq_len"])
        for r in rows
    }
    for name, by_cap in BY_HAND.items():
        for cap, longest in by_cap.items():
            assert found[f"attention={name}", cap or ""] == longest
    assert {r["bound"] for r in rows} == {"memory"}
    assert [r["cap_bytes"] and int(r["cap_bytes"]) // GIB for r in rows] == [24, "", 8] * 2
    text = (out / "longest_context.md").read_text()
    assert "| longest N | 24 GiB | all memory | 8 GiB |" in text
    assert "| attention=naive | 4,864 | 6,144 | 2,560 |" in text
    assert (out / "longest_context.png").read_bytes().startswith(b"\x89PNG")
    assert "N = 4,096  trains  17.000 GiB  4.1 s/step" in capsys.readouterr().out

    device.asked.clear()
    assert longest_context.main([*arguments, "--tolerance=0", "--start=4096"]) == 0
    assert device.asked == []  # all is known
    assert table(out) == rows


def test_the_csv_says_how_long_the_step_that_was_too_slow_took(device, tmp_path):
    """A step takes a millisecond a token; 5.12 s end within the limit, 5.376 do not."""
    arguments = ["attention=flash_v1", "--limit=5.2", "--tolerance=0", f"--out={tmp_path}"]
    assert longest_context.main(arguments) == 0
    (row,) = table(tmp_path)
    assert (row["longest_seq_len"], row["bound"]) == ("5120", "time")
    assert row["ended_by_seq_len"] == "5376"
    assert row["ended_by"] == "5.4 s, 6.250 GiB allocated"


def test_on_a_gpu_the_prediction_is_tried_first(device, tmp_path, monkeypatch):
    def longest_that_fits(cfg, card_bytes):
        assert (card_bytes, cfg.global_batch_tokens) == (40 * GIB, "auto")  # as a trial's step
        return 6200 if "Naive" in cfg.attention._target_ else 39_900

    monkeypatch.setattr(predict, "longest_that_fits", longest_that_fits)
    monkeypatch.setattr(Device, "kind", "cuda")
    arguments = ["attention=naive,flash_v1", "global_batch_tokens=2048", f"--out={tmp_path}"]
    assert longest_context.main(arguments) == 0
    # The device has to be known first; a step above what fits ends a search.
    assert [n for naive, n, _ in device.asked if naive] == [1024, 6144, 6400]
    assert [n for naive, n, _ in device.asked if not naive] == [39_680, 40_448]


def test_the_search_goes_on_without_a_prediction_that_fails(device, tmp_path, monkeypatch, capsys):
    def longest_that_fits(cfg, card_bytes):
        raise RuntimeError("no fake tensor\nand more")

    monkeypatch.setattr(predict, "longest_that_fits", longest_that_fits)
    monkeypatch.setattr(Device, "kind", "cuda")
    assert longest_context.main(["attention=naive", f"--out={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert said.count("the memory was not predicted (RuntimeError: no fake tensor)\n") == 1
    assert table(tmp_path)[0]["longest_seq_len"] == "6144"


def test_two_names_of_one_config_share_their_trials(device, tmp_path):
    named = ["--variant=a: attention=naive", "--variant=b: attention=naive"]
    assert longest_context.main([*named, f"--out={tmp_path}"]) == 0
    assert len(set(device.asked)) == len(device.asked)
    assert len({row["longest_seq_len"] for row in table(tmp_path)}) == 1


def test_a_crash_is_a_row_that_says_so_and_the_next_goes_on(device, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Device, "crash", 1536)
    arguments = ["attention=naive,flash_v1", f"--out={tmp_path}", "--largest=3072", "--limit=2.5"]
    assert longest_context.main(arguments) == 1
    printed = capsys.readouterr().out
    line = "failed at 1,536 tokens (killed by SIGSEGV; last line: oh)"
    assert f"attention=naive, card all: {line}; 1,024 tokens trained before" in printed
    assert [(r["bound"], r["longest_seq_len"]) for r in table(tmp_path)] == [("failed", "")] * 2

    monkeypatch.setattr(Device, "crash", None)
    assert longest_context.main(arguments) == 0  # what failed is tried again
    # 2,560 tokens take 2.56 s
    assert [(r["bound"], r["longest_seq_len"]) for r in table(tmp_path)] == [("time", "2304")] * 2


def test_killed_in_the_middle_it_leaves_no_trial_behind_and_goes_on(tmp_path):
    (tmp_path / "trial.py").write_text(TRIAL)
    (tmp_path / "hang").write_text("4096")
    out = tmp_path / "out"
    program = f"""
        import functools, sys
        from scripts import longest_context
        from training.probe_process import ProbeRunner
        command = (sys.executable, {str(tmp_path / "trial.py")!r})
        longest_context.ProbeRunner = functools.partial(ProbeRunner, command=command)
        sys.exit(longest_context.main(["--largest=8192", "--out={out}"]))
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    parent = subprocess.Popen(command, cwd=ROOT)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not psutil.pid_exists(pid))
    assert asked(tmp_path) == [1024, 2048, 4096]
    assert [(r["bound"], r["trained_seq_len"]) for r in table(out)] == [("searching", "2048")]

    (tmp_path / "hang").unlink()
    assert subprocess.run(command, cwd=ROOT).returncode == 0
    assert asked(tmp_path) == [1024, 2048, 4096, 4096, 8192]
    assert [(r["bound"], r["longest_seq_len"]) for r in table(out)] == [("largest", "8192")]
    assert not list(out.glob("process_*.log"))


def wait_for(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_real_trial_on_this_machine(tmp_path, capfd):
    arguments = ["attention=flash_v1", "model.n_layer=1", "model.width=32", "device=cpu"]
    arguments += [f"--out={tmp_path}", "--start=256", "--largest=256", "--steps=1"]
    assert longest_context.main(arguments) == 0, capfd.readouterr().out
    row = table(tmp_path)[0]
    assert (row["longest_seq_len"], row["bound"], row["trials"]) == ("256", "largest", "1")
    assert float(row["seconds_per_step"]) > 0
    assert int(row["peak_allocated_bytes"]) > 2**27  # PyTorch alone is more
    results = [json.loads(f.read_text()) for f in sorted(tmp_path.glob("*/probe_*.json"))]
    assert [(r["seq_len"], r["status"]) for r in results] == [(256, "ok")]


# --- the command line --------------------------------------------------------------------------


def names(*arguments: str) -> list[str]:
    args = parse(list(arguments))
    return [v.name for v in make_variants(args.overrides, args.variant, args.start, Path("out"))]


def test_lists_make_a_variant_of_each_combination():
    assert names("attention=naive,sdpa", "loss=full,chunked", "model=tiny") == [
        "attention=naive loss=full",
        "attention=naive loss=chunked",
        "attention=sdpa loss=full",
        "attention=sdpa loss=chunked",
    ]


def test_named_variants_share_the_settings_of_all():
    args = parse(
        [
            "model.n_layer=3",
            "--variant=standard: attention=naive",
            "--variant=all: attention=flash_v1 model.activation_checkpointing=none,block",
            "seed=1",
        ]
    )
    variants = make_variants(args.overrides, args.variant, 512, Path("out"))
    assert [v.name for v in variants] == [
        "standard",
        "all, model.activation_checkpointing=none",
        "all, model.activation_checkpointing=block",
    ]
    assert [v.cfg.model.n_layer for v in variants] == [3, 3, 3]
    assert variants[2].cfg.model.activation_checkpointing == "block"
    assert variants[0].cfg.attention._target_.endswith("NaiveAttention")
    assert len({v.folder for v in variants}) == 3


def test_trials_are_found_under_another_name_and_by_no_other_config():
    def folder(*overrides, named="a"):
        return make_variants([*overrides], [f"{named}: attention=naive"], 512, Path())[0].folder

    assert folder("model.width=64") == folder("model.width=64", named="b")
    assert folder("model.width=64") == folder("model.width=64", "data=recall", "seed=3")
    assert folder("model.width=64") != folder("model.width=128")
    assert folder() != folder("precision=32-true") != folder("loss=chunked")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["attention=nope"], "attention=nope is no choice; give one of flash_v1, flash_v2, naive"),
        (["model.layers=2"], "there is no key model.layers; did you mean model.n_layer?"),
        (["seq_len=8192"], "seq_len=8192: the search decides the length; give --start, --largest"),
        (["naive"], "naive is no setting; give key=value"),
        (["model.n_head=3"], "model.n_head=3 does not divide model.width=128"),
        (["--variant", "attention=naive"], "--variant='attention=naive' has no name; give 'NAME"),
        (["--variant=a:", "--variant=a: loss=full"], "--variant: the name 'a' is given twice"),
    ],
)
def test_a_wrong_setting_is_one_sentence(arguments, sentence, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["longest_context.py", *arguments])
    with pytest.raises(SystemExit) as stop:
        longest_context.main([*arguments, f"--out={tmp_path / 'out'}"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--caps=24,x", "argument --caps: '24,x' is not accepted; give numbers above 0, or none"),
        ("--caps=0", "argument --caps: '0' is not accepted; give numbers above 0, or none"),
        ("--limit=nan", "argument --limit: 'nan' is not accepted; give a number above 0"),
        ("--tolerance=1", "argument --tolerance: '1' is not accepted; give a number of at least 0"),
        ("--largest=100", "--largest=100 is no length; give at least 256"),
        ("--start=100", "--start=100 must be from --multiple=256 to --largest"),
    ],
)
def test_a_wrong_option_is_refused(argument, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        parse([argument])
    assert stop.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_folder_that_another_search_holds_is_said_to_be_out_s(tmp_path, capsys):
    with held(tmp_path), pytest.raises(SystemExit) as stop:
        longest_context.main(["attention=naive", f"--out={tmp_path}"])
    assert stop.value.code == 2
    assert "is in use by another run; give another --out\n" in capsys.readouterr().err


def test_a_disk_that_becomes_full_is_one_sentence(tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(longest_context.Search, "run", full)
    assert ended(lambda: longest_context.main(["attention=naive", f"--out={tmp_path}"])) == 1
    said = "error: no room (No space left on device); make some and run again\n"
    assert capsys.readouterr().err == said


def test_caps_are_gib_and_none():
    assert parse(["--caps=24,none,0.5,24"]).caps == [24 * GIB, None, GIB // 2]
    assert parse([]).caps == [None]
