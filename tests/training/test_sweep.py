"""Jobs of a sweep as processes of their own: what they print, how they end, how they stop."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from training import sweep
from training.sweep import SweepReport, _arguments, run_job

ROOT = Path(__file__).resolve().parents[2]

# Stands for train.py: does what its override `act` says.
JOB = """
import json, os, pathlib, re, signal, subprocess, sys, time
arguments = sys.argv[1:]
folder = pathlib.Path(re.fullmatch("hydra.run.dir='(.*)'", arguments[-1]).group(1))
act = next(a for a in arguments if a.startswith("act=")).removeprefix("act=")

def summary(status, **more):
    (folder / "summary.json").write_text(json.dumps({"status": status, **more}))

print("arguments", json.dumps(arguments))
print("to stderr", file=sys.stderr)
if act == "ok":
    summary("ok", attention="naive", seq_len=8, pid=os.getpid())
elif act == "oom":
    summary("oom", error="no room\\nadvice")
    sys.exit(3)
elif act == "exit":
    sys.exit(7)
elif act == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif act == "orphan":  # dies while a worker of its holds the pipe
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    (folder / "worker").write_text(str(worker.pid))
    os.kill(os.getpid(), signal.SIGKILL)
else:
    try:
        (folder / "ready").touch()
        time.sleep(60)
    except KeyboardInterrupt:
        if act == "stubborn":
            time.sleep(60)
        summary("interrupted")
        sys.exit(130)
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.fixture
def hydra_cfg(tmp_path):
    """What HydraConfig.get() holds inside a job, as far as it is used."""

    def make(act: str, number: int = 0, name: str = "attention=naive,seq_len=8"):
        return OmegaConf.create(
            {
                "job": {"num": number, "config_name": "train"},
                "runtime": {
                    "output_dir": str(tmp_path / "sweep" / f"{number}_{name}"),
                    "choices": {"attention": "naive", "model": "tiny"},
                },
                "overrides": {
                    "task": [f"act={act}", "text='a, b'"],
                    "hydra": ["hydra.mode=MULTIRUN", "hydra.verbose=true", "hydra.run.dir=x"],
                },
            }
        )

    return make


def folder_of(cfg) -> Path:
    return Path(cfg.runtime.output_dir)


def test_a_jobs_summary_is_returned(hydra_cfg, script):
    summary = run_job(hydra_cfg("ok"), script)
    assert summary["status"] == "ok"
    assert summary["pid"] != os.getpid()


def test_a_job_gets_its_overrides_and_a_single_run_in_its_folder(hydra_cfg, script):
    cfg = hydra_cfg("ok")
    run_job(cfg, script)
    line = (folder_of(cfg) / "console.log").read_text().splitlines()[0]
    assert json.loads(line.removeprefix("arguments ")) == [
        "--config-name=train",
        "hydra.verbose=true",
        "act=ok",
        "text='a, b'",
        "hydra.mode=RUN",
        f"hydra.run.dir='{folder_of(cfg)}'",
    ]


def test_a_folder_with_odd_characters_survives_hydras_grammar(hydra_cfg, script):
    cfg = hydra_cfg("ok", name=r"text='a\b',c={d} #")
    arguments = _arguments(cfg, folder_of(cfg))
    (override,) = OverridesParser.create().parse_overrides([arguments[-1]])
    assert override.value() == str(folder_of(cfg))


def test_output_goes_to_the_terminal_and_to_a_file(hydra_cfg, script, capsys):
    cfg = hydra_cfg("ok", number=4)
    run_job(cfg, script)
    shown, logged = capsys.readouterr().out, (folder_of(cfg) / "console.log").read_text()
    assert "to stderr" in logged
    assert logged in shown
    assert "=== job 4: act=ok" in shown
    assert "=== job 4: ok" in shown


def test_how_a_job_ended_is_shown_at_once(hydra_cfg, script, capsys):
    run_job(hydra_cfg("oom"), script)
    assert "=== job 0: oom\n" in capsys.readouterr().out
    run_job(hydra_cfg("killed", 1), script)
    shown = capsys.readouterr().out
    assert "error: killed by SIGKILL" in shown
    assert "=== job 1: crashed\n" in shown


def test_a_job_that_died_without_a_summary_gets_one(hydra_cfg, script):
    cfg = hydra_cfg("exit")
    (folder_of(cfg) / ".hydra").mkdir(parents=True)
    (folder_of(cfg) / ".hydra" / "config.yaml").write_text("seq_len: 8")
    summary = run_job(cfg, script)
    assert summary == json.loads((folder_of(cfg) / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("crashed", 7)
    assert (summary["attention"], summary["model"], summary["seq_len"]) == ("naive", "tiny", 8)
    assert "exit code 7" in summary["error"]


def test_a_killed_jobs_signal_is_named(hydra_cfg, script):
    summary = run_job(hydra_cfg("killed"), script)
    assert (summary["status"], summary["signal"]) == ("crashed", "SIGKILL")
    assert "memory" in summary["error"]


def test_a_killed_jobs_workers_end_with_it(hydra_cfg, script):
    cfg = hydra_cfg("orphan")
    assert run_job(cfg, script)["status"] == "crashed"
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        worker = psutil.Process(int((folder_of(cfg) / "worker").read_text()))
        while worker.status() != psutil.STATUS_ZOMBIE:  # dead, if perhaps not yet reaped
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def windows(monkeypatch):
    """What Windows lacks is gone."""
    monkeypatch.setattr(sweep, "WINDOWS", True)
    monkeypatch.delattr(os, "killpg")
    monkeypatch.delattr(signal, "SIGKILL")


def test_a_job_runs_where_there_are_no_process_groups(hydra_cfg, script, windows):
    assert run_job(hydra_cfg("ok"), script)["status"] == "ok"


def test_a_job_that_ctrl_c_reached_is_waited_for_where_none_can_be_sent(windows):
    class Process:
        def send_signal(self, number):
            raise ValueError(f"Unsupported signal: {number}")

        def wait(self, timeout=None):
            self.waited = timeout

    process = Process()
    sweep._stop(process)
    assert process.waited == sweep.STOP_GRACE_S


def test_the_summary_of_an_earlier_sweep_is_not_taken_for_this_ones(hydra_cfg, script):
    cfg = hydra_cfg("killed")
    folder_of(cfg).mkdir(parents=True)
    (folder_of(cfg) / "summary.json").write_text('{"status": "error"}')
    assert run_job(cfg, script)["status"] == "crashed"


def test_a_job_that_an_earlier_sweep_finished_is_kept(hydra_cfg, script):
    cfg = hydra_cfg("killed")
    folder_of(cfg).mkdir(parents=True)
    (folder_of(cfg) / "summary.json").write_text('{"status": "ok", "val_loss": 1.5}')
    assert run_job(cfg, script) == {"status": "ok", "val_loss": 1.5}
    assert not (folder_of(cfg) / "console.log").exists()


def start_in_background(hydra_cfg, script, tmp_path, act: str) -> tuple[subprocess.Popen, Path]:
    """run_job in a process of its own, once its job has started."""
    cfg = hydra_cfg(act)
    OmegaConf.save(cfg, tmp_path / "cfg.yaml")
    program = f"""
        import pathlib, signal
        from omegaconf import OmegaConf
        from training import sweep
        signal.signal(signal.SIGINT, signal.default_int_handler)  # even if started with `&`
        sweep.STOP_GRACE_S = 1.0
        sweep.run_job(OmegaConf.load({str(tmp_path / "cfg.yaml")!r}), pathlib.Path({str(script)!r}))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (folder_of(cfg) / "ready").exists():
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process, folder_of(cfg)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_lets_its_job_finish_and_exits_130(
    hydra_cfg, script, tmp_path, number
):
    process, folder = start_in_background(hydra_cfg, script, tmp_path, "wait")
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "job 0 interrupted; the sweep stops here" in error
    assert "Traceback" not in error
    assert json.loads((folder / "summary.json").read_text())["status"] == "interrupted"


def test_a_job_that_does_not_stop_is_killed(hydra_cfg, script, tmp_path):
    process, folder = start_in_background(hydra_cfg, script, tmp_path, "stubborn")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    assert not (folder / "summary.json").exists()


def hydra_config(folder: Path, mode=RunMode.MULTIRUN):
    """The configuration that a Hydra callback is given for the job in ``folder``."""
    config = {"runtime": {"output_dir": str(folder)}, "sweep": {"dir": str(folder.parent)}}
    return OmegaConf.create({"hydra": {**config, "mode": mode}})


def finish(*folders: Path) -> Path:
    """Go through the callbacks of a sweep whose jobs ran in ``folders``; return its folder."""
    report = SweepReport()
    for folder in folders:
        report.on_job_end(hydra_config(folder), job_return=None)
    report.on_multirun_end(hydra_config(folders[0]))
    return folders[0].parent


def test_a_sweep_ends_with_tables_plot_and_a_printed_table(hydra_cfg, script, capsys):
    jobs = [hydra_cfg("ok", 0), hydra_cfg("oom", 1)]
    for cfg in jobs:
        run_job(cfg, script)
    folder = finish(*map(folder_of, jobs))  # oom is a result: no exit
    assert (folder / "sweep.csv").read_text().count("\n") == 3
    assert "| 1 | oom |" in (folder / "sweep.md").read_text()
    assert (folder / "memory_vs_length.png").exists()
    assert "run 1 (oom): no room" in capsys.readouterr().out


def test_a_sweep_with_a_crashed_job_reports_all_and_exits_with_1(hydra_cfg, script):
    jobs = [hydra_cfg(act, i) for i, act in enumerate(("ok", "killed", "ok"))]
    for cfg in jobs:
        run_job(cfg, script)
    with pytest.raises(SystemExit) as exit:
        finish(*map(folder_of, jobs))
    assert exit.value.code == 1
    assert (folder_of(jobs[0]).parent / "sweep.csv").read_text().count("\n") == 4


def test_tables_are_there_after_every_job(hydra_cfg, script):
    report, jobs = SweepReport(), [hydra_cfg("ok", i) for i in range(2)]
    for i, cfg in enumerate(jobs):
        run_job(cfg, script)
        report.on_job_end(hydra_config(folder_of(cfg)), job_return=None)
        assert (folder_of(cfg).parent / "sweep.csv").read_text().count("\n") == 2 + i


def test_jobs_of_an_earlier_sweep_in_the_same_folder_are_left_out(hydra_cfg, script):
    jobs = [hydra_cfg("ok", 0), hydra_cfg("ok", 1)]
    for cfg in jobs:
        run_job(cfg, script)
    folder = finish(folder_of(jobs[1]))
    assert (folder / "sweep.csv").read_text().count("\n") == 2


def test_a_single_run_writes_no_table(tmp_path):
    SweepReport().on_job_end(hydra_config(tmp_path / "run", RunMode.RUN), job_return=None)
    assert not list(tmp_path.iterdir())


def test_a_report_that_cannot_be_made_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit) as exit:
        SweepReport().on_multirun_end(hydra_config(tmp_path / "missing" / "job"))
    assert exit.value.code == 1
    assert "error: the report in" in capsys.readouterr().err
