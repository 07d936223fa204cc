"""Sweeps: every job is a process of its own, so that no job's memory or failure reaches another."""

import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from training import report
from training.comparison import print_report, write_report, write_tables
from training.errors import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED
from training.report import SUMMARY
from training.signals import sigterm_interrupts

TRAIN_SCRIPT = Path(__file__).resolve().parents[1] / "train.py"
POINT = "sweep_point.yaml"  # of a job's folder: the config its summary is of
NO_POINT = ("run_dir", "output_dir", "resume", "logger", "sweep")  # keys that no result depends on
# What is kept of an earlier sweep, by sweep.rerun.
KEPT = {"failed": ("ok", "oom"), "oom": ("ok",), "all": ()}
STOP_GRACE_S = 30.0  # for an interrupted job to write its summary
DRAIN_S = 5.0  # for the last output of a job that has ended
WINDOWS = sys.platform == "win32"


def run_job(cfg: DictConfig, hydra_cfg: DictConfig, script: Path = TRAIN_SCRIPT) -> dict[str, Any]:
    """Run one job of a sweep as ``python train.py <its overrides>``; return its summary.

    The job's output is shown as it comes and kept in ``console.log`` of its folder. A job that died
    without a summary.json gets one with status "crashed" and its ``exit_code`` or ``signal``. A job
    that fails, in whatever way, raises nothing here.

    A job whose config the sweep's folder holds already, under whatever number, is not run again if
    it ended well enough for ``cfg.sweep.rerun``.

    Ctrl-C or SIGTERM stops the job (a second one at once, without a summary) and then the sweep.

    Args:
        cfg: the job's config.
        hydra_cfg: ``HydraConfig.get()`` inside the job.
        script: the program to run.

    Returns:
        The summary, with ``folder`` (the run's) and ``kept`` (whether it is of an earlier sweep).

    Raises:
        SystemExit: with code 130, when the sweep is interrupted.
    """
    folder = Path(hydra_cfg.runtime.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    number = hydra_cfg.job.num
    print(f"\n=== job {number}: {' '.join(hydra_cfg.overrides.task)}", flush=True)
    point = _point(cfg)
    if finished := _find_finished(folder, point, KEPT[cfg.sweep.rerun]):
        summary = _read_summary(finished)
        where = "" if finished == folder else f" in {finished.name}"
        print(f"=== job {number}: {summary['status']} already{where}, kept as it is", flush=True)
        if finished != folder:
            _remove_unused(folder)
        return {**summary, "folder": str(finished), "kept": True}
    (folder / SUMMARY).unlink(missing_ok=True)
    report.write_text(folder / POINT, point)
    command = [sys.executable, str(script), *_arguments(hydra_cfg, folder)]
    try:
        with sigterm_interrupts():
            return_code = _run(command, folder / "console.log")
    except KeyboardInterrupt:
        print(f"=== job {number} interrupted; the sweep stops here", file=sys.stderr, flush=True)
        sys.exit(EXIT_INTERRUPTED)
    if not (folder / SUMMARY).exists():
        _write_crash_summary(hydra_cfg, folder, return_code)
        print(f"error: {_read_summary(folder)['error']}", flush=True)  # the job could not say it
    summary = _read_summary(folder)
    print(f"=== job {number}: {summary['status']}", flush=True)
    return {**summary, "folder": str(folder), "kept": False}


def _point(cfg: DictConfig) -> str:
    """What makes a job this job and no other: its config, less what decides no number."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    return OmegaConf.to_yaml({key: plain[key] for key in sorted(plain) if key not in NO_POINT})


def _find_finished(folder: Path, point: str, kept: tuple[str, ...]) -> Path | None:
    """The folder of this sweep that holds the same point with one of the kept statuses."""
    for other in [folder, *sorted(folder.parent.iterdir())]:
        files = (other / POINT, other / SUMMARY)
        if (
            all(file.exists() for file in files)
            and files[0].read_text(encoding="utf-8") == point
            and _read_summary(other)["status"] in kept
        ):
            return other
    return None


def _remove_unused(folder: Path) -> None:
    """The folder Hydra made for a job that another folder holds, if that is all there is in it."""
    if {path.name for path in folder.iterdir()} <= {".hydra"}:
        shutil.rmtree(folder)


def _read_summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))


def _arguments(hydra_cfg: DictConfig, folder: Path) -> list[str]:
    """The job's command line: its overrides, as a single run in its own folder."""
    decided_here = ("hydra.mode=", "hydra.run.dir=")
    # A sweep's folder names hold "=" and ",", which Hydra reads as syntax unless quoted.
    quoted = str(folder).replace("'", "\\'")
    return [
        f"--config-name={hydra_cfg.job.config_name}",
        *(o for o in hydra_cfg.overrides.hydra if not o.startswith(decided_here)),
        *hydra_cfg.overrides.task,
        "hydra.mode=RUN",
        f"hydra.run.dir='{quoted}'",
    ]


def _run(command: list[str], log_file: Path) -> int:
    """Run a command, its output going to the terminal and to a file; return its exit code.

    When interrupted, the command is interrupted too and KeyboardInterrupt is raised after it ended.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,  # the terminal's Ctrl-C would reach it a second time
    )
    copier = threading.Thread(target=_copy, args=(process.stdout, log_file), daemon=True)
    copier.start()
    try:
        return process.wait()
    except KeyboardInterrupt:
        _stop(process)
        raise
    finally:
        _kill_workers(process)
        copier.join(DRAIN_S)


def _stop(process: subprocess.Popen) -> None:
    """Interrupt a process and wait for its end; kill it after a while or a second Ctrl-C."""
    if not WINDOWS:  # there the terminal's Ctrl-C has reached it, and no other can be sent
        process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_GRACE_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        process.wait()


def _kill_workers(process: subprocess.Popen) -> None:
    """End what a process left running: it would hold memory, and the pipe."""
    if WINDOWS:
        return  # it has no process groups, and nothing tells whose a worker was
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _copy(output: BinaryIO, log_file: Path) -> None:
    with log_file.open("wb") as log:
        for line in output:
            sys.stdout.write(line.decode(errors="replace"))
            sys.stdout.flush()
            log.write(line)
            log.flush()


def _write_crash_summary(hydra_cfg: DictConfig, folder: Path, return_code: int) -> None:
    """What can be said about a job that died before it could write its own summary."""
    if return_code < 0:
        name = signal.Signals(-return_code).name
        how = {"signal": name}
        hint = " (often the system's answer to memory running out)" if name == "SIGKILL" else ""
        error = f"killed by {name}{hint}"
    else:
        how = {"exit_code": return_code}
        error = f"ended with exit code {return_code}"
    config_file = folder / ".hydra" / "config.yaml"
    config = OmegaConf.load(config_file) if config_file.exists() else {}
    summary = {
        "status": "crashed",
        "error": f"{error} before it wrote {SUMMARY}; its output is in console.log",
        "attention": hydra_cfg.runtime.choices.get("attention"),
        "model": hydra_cfg.runtime.choices.get("model"),
        "seq_len": config.get("seq_len"),
        **how,
    }
    report.write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


class SweepReport(Callback):
    """Writes a sweep's tables (anew after every job) and, at its end, its plots.

    In the sweep's folder: sweep.csv, sweep.md and the plots of ``training.plots``. The table is
    also printed, and table and plots go to a W&B run of their own unless ``logger.wandb`` is null.
    The program's exit code is 1 when a job ended other than "ok" or "oom".
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []
        self._started = self._job_started = time.monotonic()
        self._seconds: list[float] = []  # of each job that was run
        self._total: int | None = None

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        rerun = config.sweep.rerun
        if rerun not in KEPT:
            print(
                f"error: sweep.rerun={rerun} is not accepted; give one of {', '.join(KEPT)}",
                file=sys.stderr,
            )
            sys.exit(EXIT_BAD_INPUT)
        self._started = time.monotonic()
        self._total = count_jobs(config.hydra)

    def on_job_start(self, config: DictConfig, **kwargs: Any) -> None:
        self._job_started = time.monotonic()

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if config.hydra.mode != RunMode.MULTIRUN:
            return
        job = job_return.return_value
        self._folders.append(Path(job["folder"]))
        if not job["kept"]:
            self._seconds.append(time.monotonic() - self._job_started)
        folder = Path(config.hydra.sweep.dir)
        write_tables(report.read_rows([*self._folders, *self._to_come(folder)]), folder)
        print(f"=== {self._progress()}", flush=True)

    def _to_come(self, folder: Path) -> list[Path]:
        """The folders of an earlier sweep here that this one has not come to: until it ends, its
        tables must not have fewer rows than theirs."""
        earlier = {summary.parent.resolve() for summary in folder.glob(f"*/{SUMMARY}")}
        return sorted(earlier - {done.resolve() for done in self._folders})

    def _progress(self) -> str:
        done = len(self._folders)
        elapsed = duration(time.monotonic() - self._started)
        if self._total is None:
            return f"{done} jobs done, {elapsed} elapsed"
        text = f"job {done} of {self._total} done, {elapsed} elapsed"
        left = self._total - done
        if left and self._seconds:
            # Of those left, some may be kept, and longer sequences take longer.
            return f"{text}, about {duration(left * statistics.mean(self._seconds))} left"
        return text

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            rows = report.read_rows(self._folders)
            plots = write_report(rows, folder)
            print_report(rows, folder)
        except Exception as error:  # Hydra would make it a warning and exit with 0
            print(f"error: the report in {folder} could not be made: {error}", file=sys.stderr)
            sys.exit(EXIT_FAILED)
        try:
            self._log(config, folder, rows, plots)
        except Exception as error:
            print(f"error: W&B did not take the report in {folder}: {error}", file=sys.stderr)
            sys.exit(EXIT_FAILED)
        if any(row["status"] not in report.FINISHED for row in rows):
            sys.exit(EXIT_FAILED)

    @staticmethod
    def _log(config: DictConfig, folder: Path, rows: list[report.Row], plots: list[Path]) -> None:
        if config.logger.wandb:
            from training.loggers import log_report

            log_report(config.logger.wandb, folder, report.plain(rows), plots)


def count_jobs(hydra_cfg: DictConfig) -> int | None:
    """How many jobs a sweep has; None where its sweeper decides that as it goes."""
    if not hydra_cfg.sweeper._target_.endswith("BasicSweeper"):
        return None
    params = [f"{key}={value}" for key, value in (hydra_cfg.sweeper.params or {}).items()]
    try:
        given = OverridesParser.create().parse_overrides([*hydra_cfg.overrides.task, *params])
        sweeps = [o for o in given if o.is_sweep_override()]
        return math.prod(len(list(sweep.sweep_string_iterator())) for sweep in sweeps)
    except HydraException:  # a glob, which needs the configs
        return None


def duration(seconds: float) -> str:
    """To the second; in hours and minutes where that is long."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {seconds:02} s" if minutes else f"{seconds} s"
