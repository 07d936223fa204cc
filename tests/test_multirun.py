"""Real sweeps of train.py: one process per job, one table, whatever happens to a job."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from training.plots import PLOTS

ROOT = Path(__file__).resolve().parents[1]
TINY = [
    "model.n_layer=1",
    "model.width=32",
    "data.val_tokens=512",
    "sample.max_new_tokens=0",
    "logger=csv",
    "device=cpu",
    # One sequence a step, whatever its length.
    "global_batch_tokens=${seq_len}",
    "micro_batch_tokens=${seq_len}",
]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# Naive attention of one layer keeps 4 heads * N^2 * 4 bytes: 4 TiB.
TOO_LONG = 2**19

# The job of this length ends its process at its first step. Other ways to end, and to run out of
# memory on the way, need no sweep: training/test_sweep.py and test_train.py.
DIE = "+callbacks.die={_target_: tests.dying.Die, seq_len: ${seq_len}, ways: {31: segv}}"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> list[str]:
    """A small corpus of its own; its validation text is longer than the longest context."""
    folder = tmp_path_factory.mktemp("corpus")
    for name in ("a.txt", "b.txt"):
        (folder / name).write_text("To be, or not to be.\n" * (TOO_LONG // 20))
    return ["data=text_files", f"data.files={folder}/*.txt", f"data.cache_dir={folder}/cache"]


def train(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "train.py", *arguments, *TINY],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=290,
    )


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


@pytest.fixture(scope="module")
def sweep(corpus, tmp_path_factory):
    """Jobs too long, refused and dying, then a good one: the finished sweep and its folder."""
    folder = tmp_path_factory.mktemp("sweep")
    lengths = f"seq_len={TOO_LONG},0,31,64"
    done = train(
        "-m", "attention=naive", "max_steps=3", lengths, DIE, *corpus, f"hydra.sweep.dir={folder}"
    )
    return done, folder


def test_a_job_that_fails_does_not_stop_the_sweep(sweep):
    done, folder = sweep
    assert done.returncode == 1, done.stdout + done.stderr
    with (folder / "sweep.csv").open() as file:
        rows = list(csv.DictReader(file))
    ends = [(row["status"], row["signal"], row["exit_code"]) for row in rows]
    assert ends == [
        ("oom", "", "3"),
        ("error", "", "2"),
        ("crashed", "SIGSEGV", ""),
        ("ok", "", "0"),
    ]


def test_the_error_of_a_job_is_shown_before_the_next_job_starts(sweep):
    output = sweep[0].stdout
    assert output.index("GiB for backward") < output.index("=== job 1: ")
    assert output.index("seq_len=0 is not accepted") < output.index("=== job 2: ")
    assert "Traceback" not in output + sweep[0].stderr


def test_a_refused_job_says_one_line_and_leaves_no_more_than_its_summary(sweep):
    (job,) = sweep[1].glob("1_*")
    sentence = "error: seq_len=0 is not accepted; give an integer of at least 1\n"
    assert (job / "console.log").read_text() == sentence
    left = {"console.log", "summary.json", "sweep_point.yaml", ".hydra"}
    assert {path.name for path in job.iterdir()} == left


def test_a_sweep_leaves_tables_and_plots(sweep):
    done, folder = sweep
    assert "longest seq_len that trained with naive: 64" in (folder / "sweep.md").read_text()
    assert "longest seq_len that trained with naive: 64" in done.stdout
    for name in PLOTS:
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name


def test_running_out_of_memory_is_a_row_with_what_it_would_have_taken(sweep):
    (job,) = sweep[1].glob("0_*")
    summary = summary_of(job)
    assert summary["status"] == "oom"
    assert summary["saved_attention_bytes"] > 4 * TOO_LONG**2 * 4
    assert summary["steps"] == 0


# What the clock, the system's allocator or the command line decides.
NOT_DETERMINED = {
    *("tokens_per_s", "mfu", "wall_s", "peak_rss_bytes", "memory_before_forward_bytes"),
    *("command", "run_dir"),
}


def test_a_job_after_others_died_has_the_numbers_of_a_run_alone(sweep, corpus, tmp_path):
    alone = train(
        "attention=naive", "max_steps=3", "seq_len=64", *corpus, f"hydra.run.dir={tmp_path}"
    )
    assert alone.returncode == 0, alone.stdout + alone.stderr
    (job,) = sweep[1].glob("3_*")
    in_sweep, alone = summary_of(job), summary_of(tmp_path)
    assert in_sweep.keys() == alone.keys()
    for key in in_sweep.keys() - NOT_DETERMINED:
        assert in_sweep[key] == alone[key], key
    assert sum(in_sweep["memory_parts_bytes"].values()) > in_sweep["saved_total_bytes"] > 0
    for key in ("peak_rss_bytes", "memory_before_forward_bytes"):
        assert in_sweep[key] == pytest.approx(alone[key], rel=0.2), key


def test_the_same_jobs_in_the_same_folder_are_kept_whatever_their_numbers(sweep, corpus):
    """Out of memory is a result too: 64 was job 3, and is job 0 now."""
    before = {path: path.read_bytes() for path in sweep[1].glob("*/summary.json")}
    lengths = f"seq_len=64,{TOO_LONG}"
    done = train(
        "-m", "attention=naive", "max_steps=3", lengths, DIE, *corpus, f"hydra.sweep.dir={sweep[1]}"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "=== job 0: ok already in 3_" in done.stdout
    assert "=== job 1: oom already in 0_" in done.stdout
    assert "=== job 2 of 2 done" in done.stdout
    assert {path: path.read_bytes() for path in sweep[1].glob("*/summary.json")} == before
    with (sweep[1] / "sweep.csv").open() as file:
        assert [row["seq_len"] for row in csv.DictReader(file)] == ["64", str(TOO_LONG)]


def test_ctrl_c_stops_the_job_and_the_sweep(corpus, tmp_path):
    arguments = ["-m", "seed=0,1", "seq_len=64", "max_steps=1000000", "trainer.val_every_n_steps=5"]
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments, *TINY, *corpus, f"hydra.sweep.dir={tmp_path}"],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # pytest itself may run in the background, where Ctrl-C is ignored and stays so.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    # The first validation's line: the job is training.
    assert any(line.startswith("step") for line in process.stdout)
    (job,) = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    output = process.communicate(timeout=60)[0]

    assert process.returncode == 130, output
    assert not job.is_running()
    assert "Traceback" not in output
    (folder,) = tmp_path.glob("?_*")  # the second job was not started
    assert summary_of(folder)["status"] == "interrupted"
