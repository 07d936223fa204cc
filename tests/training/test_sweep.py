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
from types import SimpleNamespace

import psutil
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from training import sweep
from training.plots import PLOTS
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


CFG = OmegaConf.create(
    {"seq_len": 8, "run_dir": "x", "logger": {"wandb": None}, "sweep": {"rerun": "failed"}}
)


def start(hydra_cfg, script, **changes) -> dict:
    """run_job with the config of a job, some of its keys changed."""
    job = {"seed": hydra_cfg.job.num}  # no two jobs are alike
    return run_job(OmegaConf.merge(CFG, job, changes), hydra_cfg, script)


def folder_of(cfg) -> Path:
    return Path(cfg.runtime.output_dir)


def test_a_jobs_summary_is_returned(hydra_cfg, script):
    summary = start(hydra_cfg("ok"), script)
    assert summary["status"] == "ok"
    assert summary["pid"] != os.getpid()


def test_a_job_gets_its_overrides_and_a_single_run_in_its_folder(hydra_cfg, script):
    cfg = hydra_cfg("ok")
    start(cfg, script)
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
    start(cfg, script)
    shown, logged = capsys.readouterr().out, (folder_of(cfg) / "console.log").read_text()
    assert "to stderr" in logged
    assert logged in shown
    assert "=== job 4: act=ok" in shown
    assert "=== job 4: ok" in shown


def test_how_a_job_ended_is_shown_at_once(hydra_cfg, script, capsys):
    start(hydra_cfg("oom"), script)
    assert "=== job 0: oom\n" in capsys.readouterr().out
    start(hydra_cfg("killed", 1), script)
    shown = capsys.readouterr().out
    assert "error: killed by SIGKILL" in shown
    assert "=== job 1: crashed\n" in shown


def test_a_job_that_died_without_a_summary_gets_one(hydra_cfg, script):
    cfg = hydra_cfg("exit")
    (folder_of(cfg) / ".hydra").mkdir(parents=True)
    (folder_of(cfg) / ".hydra" / "config.yaml").write_text("seq_len: 8")
    summary = start(cfg, script)
    written = json.loads((folder_of(cfg) / "summary.json").read_text())
    assert summary == {**written, "folder": str(folder_of(cfg)), "kept": False}
    assert (summary["status"], summary["exit_code"]) == ("crashed", 7)
    assert (summary["attention"], summary["model"], summary["seq_len"]) == ("naive", "tiny", 8)
    assert "exit code 7" in summary["error"]


def test_a_killed_jobs_signal_is_named(hydra_cfg, script):
    summary = start(hydra_cfg("killed"), script)
    assert (summary["status"], summary["signal"]) == ("crashed", "SIGKILL")
    assert "memory" in summary["error"]


def test_a_killed_jobs_workers_end_with_it(hydra_cfg, script):
    cfg = hydra_cfg("orphan")
    assert start(cfg, script)["status"] == "crashed"
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
    assert start(hydra_cfg("ok"), script)["status"] == "ok"


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
    assert start(cfg, script)["status"] == "crashed"


def ran(hydra_cfg, script, **changes) -> bool:
    """Whether the job was run, and not kept."""
    return not start(hydra_cfg, script, **changes)["kept"]


@pytest.mark.parametrize(
    ("act", "rerun", "again"),
    [
        ("ok", "failed", False),
        ("oom", "failed", False),
        ("exit", "failed", True),
        ("killed", "failed", True),
        ("ok", "oom", False),
        ("oom", "oom", True),
        ("exit", "oom", True),
        ("ok", "all", True),
    ],
)
def test_which_jobs_of_an_earlier_sweep_run_again(hydra_cfg, script, act, rerun, again):
    first = start(hydra_cfg(act), script)
    second = start(hydra_cfg(act), script, sweep={"rerun": rerun})
    assert second["kept"] is not again
    assert second["status"] == first["status"]
    if act == "ok":
        assert (second["pid"] != first["pid"]) is again


def test_a_job_of_the_same_folder_with_another_config_is_another_job(hydra_cfg, script):
    """A key may change in a file, or beyond the letters that a folder's name has."""
    start(hydra_cfg("ok"), script, max_steps=3)
    assert ran(hydra_cfg("ok"), script, max_steps=4)
    assert ran(hydra_cfg("ok"), script, max_steps=3)  # its folder holds the other one now
    assert not ran(hydra_cfg("ok"), script, max_steps=3)


def test_a_summary_without_the_config_it_is_of_is_not_kept(hydra_cfg, script):
    cfg = hydra_cfg("ok")
    folder_of(cfg).mkdir(parents=True)
    (folder_of(cfg) / "summary.json").write_text('{"status": "ok"}')
    assert ran(cfg, script)


def test_where_results_go_makes_no_other_job(hydra_cfg, script):
    start(hydra_cfg("ok"), script)
    assert not ran(hydra_cfg("ok"), script, run_dir="y", logger={"wandb": {"mode": "offline"}})


def test_a_job_is_found_under_the_number_an_earlier_sweep_gave_it(hydra_cfg, script):
    first = hydra_cfg("ok", 1, name="x")
    start(first, script, seed=7)
    second = hydra_cfg("ok", 3, name="x")
    (folder_of(second) / ".hydra").mkdir(parents=True)  # as Hydra does before the job
    found = start(second, script, seed=7)
    assert (found["kept"], found["folder"]) == (True, str(folder_of(first)))
    assert not folder_of(second).exists()


def test_a_job_stopped_before_its_summary_runs_again(hydra_cfg, script):
    start(hydra_cfg("ok"), script)
    (folder_of(hydra_cfg("ok")) / "summary.json").unlink()
    assert ran(hydra_cfg("ok"), script)


@pytest.mark.parametrize(
    ("overrides", "jobs"),
    [
        (["attention=naive,flash_v1", "seq_len=1,2,3", "max_steps=5"], 6),
        (["seed=range(4)", "text='a,b'"], 4),
        (["optim.betas=[0.9,0.95]"], 1),
    ],
)
def test_the_jobs_of_a_sweep_are_counted(overrides, jobs):
    sweeper = {"_target_": "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"}
    cfg = {"sweeper": {**sweeper, "params": None}, "overrides": {"task": overrides}}
    assert sweep.count_jobs(OmegaConf.create(cfg)) == jobs
    cfg["sweeper"]["params"] = {"model.n_layer": "1,2"}
    assert sweep.count_jobs(OmegaConf.create(cfg)) == 2 * jobs
    cfg["sweeper"]["_target_"] = "hydra_plugins.hydra_optuna_sweeper.OptunaSweeper"
    assert sweep.count_jobs(OmegaConf.create(cfg)) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(7.4, "7 s"), (59.7, "1 min 00 s"), (3599, "59 min 59 s"), (7380, "2 h 03 min")],
)
def test_a_duration_is_readable(seconds, text):
    assert sweep.duration(seconds) == text


def test_progress_leaves_kept_jobs_out_of_the_estimate(monkeypatch, hydra_cfg, script, capsys):
    now = [0.0]
    monkeypatch.setattr(sweep.time, "monotonic", lambda: now[0])
    cfg = hydra_config(folder_of(hydra_cfg("ok")))
    report = SweepReport()
    report._total = 4
    for number, (seconds, kept) in enumerate([(0, True), (10, False), (20, False), (30, False)]):
        start(hydra_cfg("ok", number), script)
        report.on_job_start(cfg)
        now[0] += seconds
        report.on_job_end(cfg, returned(folder_of(hydra_cfg("ok", number)), kept))
    shown = [line for line in capsys.readouterr().out.splitlines() if " of 4 " in line]
    assert shown == [
        "=== job 1 of 4 done, 0 s elapsed",  # nothing to estimate from
        "=== job 2 of 4 done, 10 s elapsed, about 20 s left",
        "=== job 3 of 4 done, 30 s elapsed, about 15 s left",
        "=== job 4 of 4 done, 1 min 00 s elapsed",
    ]


def test_a_bad_rerun_is_refused_before_the_first_job(capsys):
    with pytest.raises(SystemExit) as exit:
        SweepReport().on_multirun_start(OmegaConf.create({"sweep": {"rerun": "some"}}))
    assert exit.value.code == 2
    assert "sweep.rerun=some is not accepted; give one of failed" in capsys.readouterr().err


def start_in_background(hydra_cfg, script, tmp_path, act: str) -> tuple[subprocess.Popen, Path]:
    """run_job in a process of its own, once its job has started."""
    cfg = hydra_cfg(act)
    OmegaConf.save({"job_cfg": CFG, "hydra_cfg": cfg}, tmp_path / "cfg.yaml")
    program = f"""
        import pathlib, signal
        from omegaconf import OmegaConf
        from training import sweep
        signal.signal(signal.SIGINT, signal.default_int_handler)  # even if started with `&`
        sweep.STOP_GRACE_S = 1.0
        cfg = OmegaConf.load({str(tmp_path / "cfg.yaml")!r})
        sweep.run_job(cfg.job_cfg, cfg.hydra_cfg, pathlib.Path({str(script)!r}))
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
    return OmegaConf.create({"hydra": {**config, "mode": mode}, "logger": {"wandb": None}})


def returned(folder: Path, kept: bool = False) -> SimpleNamespace:
    """Hydra's JobReturn of a job in the folder."""
    return SimpleNamespace(return_value={"folder": str(folder), "kept": kept})


def finish(*folders: Path) -> Path:
    """Go through the callbacks of a sweep whose jobs ran in ``folders``; return its folder."""
    report = SweepReport()
    for folder in folders:
        report.on_job_end(hydra_config(folder), returned(folder))
    report.on_multirun_end(hydra_config(folders[0]))
    return folders[0].parent


def test_a_sweep_ends_with_tables_plot_and_a_printed_table(hydra_cfg, script, capsys):
    jobs = [hydra_cfg("ok", 0), hydra_cfg("oom", 1)]
    for cfg in jobs:
        start(cfg, script)
    folder = finish(*map(folder_of, jobs))  # oom is a result: no exit
    assert (folder / "sweep.csv").read_text().count("\n") == 3
    assert "| 1 | oom |" in (folder / "sweep.md").read_text()
    for name in PLOTS:
        assert (folder / name).read_bytes().startswith(b"\x89PNG"), name
    assert "run 1 (oom): no room" in capsys.readouterr().out


def test_a_sweep_with_a_crashed_job_reports_all_and_exits_with_1(hydra_cfg, script):
    jobs = [hydra_cfg(act, i) for i, act in enumerate(("ok", "killed", "ok"))]
    for cfg in jobs:
        start(cfg, script)
    with pytest.raises(SystemExit) as exit:
        finish(*map(folder_of, jobs))
    assert exit.value.code == 1
    assert (folder_of(jobs[0]).parent / "sweep.csv").read_text().count("\n") == 4


def test_tables_are_there_after_every_job(hydra_cfg, script):
    report, jobs = SweepReport(), [hydra_cfg("ok", i) for i in range(2)]
    for i, cfg in enumerate(jobs):
        start(cfg, script)
        report.on_job_end(hydra_config(folder_of(cfg)), returned(folder_of(cfg)))
        assert (folder_of(cfg).parent / "sweep.csv").read_text().count("\n") == 2 + i


def test_a_job_has_one_row_where_the_sweep_s_folder_is_relative(hydra_cfg, script, monkeypatch):
    """As multirun/..., from which Hydra makes the absolute folders of the jobs."""
    report, jobs = SweepReport(), [hydra_cfg("ok", i) for i in range(2)]
    sweep_dir = folder_of(jobs[0]).parent
    monkeypatch.chdir(sweep_dir.parent)
    for done, cfg in enumerate(jobs, start=1):
        start(cfg, script)
        config = hydra_config(Path(sweep_dir.name) / folder_of(cfg).name)
        report.on_job_end(config, returned(folder_of(cfg)))
        assert (sweep_dir / "sweep.csv").read_text().count("\n") == 1 + done


def test_a_sweep_stopped_while_it_runs_again_leaves_all_rows(hydra_cfg, script):
    """What is known of jobs it has not come to stays in the tables."""
    jobs = [hydra_cfg("ok", i) for i in range(3)]
    for cfg in jobs:
        start(cfg, script)
    folder = finish(*map(folder_of, jobs))
    again = SweepReport()
    again.on_job_end(hydra_config(folder_of(jobs[0])), returned(folder_of(jobs[0]), kept=True))
    assert (folder / "sweep.csv").read_text().count("\n") == 4


def test_jobs_of_an_earlier_sweep_in_the_same_folder_are_left_out(hydra_cfg, script):
    jobs = [hydra_cfg("ok", 0), hydra_cfg("ok", 1)]
    for cfg in jobs:
        start(cfg, script)
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


def test_the_report_goes_to_wandb_and_the_run_is_finished_whatever_happens(
    hydra_cfg, script, tmp_path, monkeypatch, capsys
):
    class Run:
        logged, finished = None, None

        def log(self, values):
            if Run.logged is None:
                Run.logged = values
            else:
                raise OSError("disk full")

        def finish(self, exit_code):
            Run.finished = exit_code

    given = {}
    monkeypatch.setattr("wandb.init", lambda **settings: given.update(settings) or Run())
    monkeypatch.setattr("wandb.Table", lambda columns, cells, **_: (columns, cells))
    monkeypatch.setattr("wandb.Image", str)
    start(hydra_cfg("ok"), script)
    folder = folder_of(hydra_cfg("ok"))
    cfg = hydra_config(folder)
    cfg.logger.wandb = {"project": "p", "name": None, "mode": "offline"}
    report = SweepReport()
    report.on_job_end(cfg, returned(folder))
    report.on_multirun_end(cfg)
    assert (given["project"], given["mode"], given["job_type"]) == ("p", "offline", "sweep-report")
    columns, cells = Run.logged["runs"]
    assert dict(zip(columns, cells[0], strict=True))["status"] == "ok"
    assert Run.logged["memory_vs_length"] == str(folder.parent / "memory_vs_length.png")
    assert Run.finished == 0

    with pytest.raises(SystemExit):  # a second report, which the run does not take
        report.on_multirun_end(cfg)
    assert Run.finished == 1
    assert "error: W&B did not take the report" in capsys.readouterr().err
