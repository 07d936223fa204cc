"""Sweeps: every job is a process of its own, so that no job's memory or failure reaches another."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from training import report
from training.report import SUMMARY
from training.signals import sigterm_interrupts

TRAIN_SCRIPT = Path(__file__).resolve().parents[1] / "train.py"
EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
STOP_GRACE_S = 30.0  # for an interrupted job to write its summary
DRAIN_S = 5.0  # for the last output of a job that has ended
WINDOWS = sys.platform == "win32"


def run_job(hydra_cfg: DictConfig, script: Path = TRAIN_SCRIPT) -> dict[str, Any]:
    """Run one job of a sweep as ``python train.py <its overrides>``; return its summary.

    The job's output is shown as it comes and kept in ``console.log`` of its folder. A job that died
    without a summary.json gets one with status "crashed" and its ``exit_code`` or ``signal``. A job
    that fails, in whatever way, raises nothing here.

    Ctrl-C or SIGTERM stops the job (a second one at once, without a summary) and then the sweep.

    Args:
        hydra_cfg: ``HydraConfig.get()`` inside the job.
        script: the program to run.

    Raises:
        SystemExit: with code 130, when the sweep is interrupted.
    """
    folder = Path(hydra_cfg.runtime.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    number = hydra_cfg.job.num
    print(f"\n=== job {number}: {' '.join(hydra_cfg.overrides.task)}", flush=True)
    if (folder / SUMMARY).exists():  # of an earlier sweep in the same folder
        summary = _read_summary(folder)
        if summary["status"] == "ok":
            print(f"=== job {number}: ok already, kept as it is", flush=True)
            return summary
        (folder / SUMMARY).unlink()
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
    return summary


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
    """Writes a sweep's tables (anew after every job) and, at its end, its plot.

    In the sweep's folder: sweep.csv, sweep.md and memory_vs_length.png. The table is also printed.
    The program's exit code is 1 when a job ended other than "ok" or "oom".
    """

    def __init__(self) -> None:
        self._folders: list[Path] = []

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        if config.hydra.mode == RunMode.MULTIRUN:
            self._folders.append(Path(config.hydra.runtime.output_dir))
            _write_tables(report.read_rows(self._folders), Path(config.hydra.sweep.dir))

    def on_multirun_end(self, config: DictConfig, **kwargs: Any) -> None:
        folder = Path(config.hydra.sweep.dir)
        try:
            rows = report.read_rows(self._folders)
            _write_tables(rows, folder)
            report.plot_memory(rows, folder / "memory_vs_length.png")
            _print_report(rows, folder)
        except Exception as error:  # Hydra would make it a warning and exit with 0
            print(f"error: the report in {folder} could not be made: {error}", file=sys.stderr)
            sys.exit(EXIT_FAILED)
        if any(row["status"] not in report.FINISHED for row in rows):
            sys.exit(EXIT_FAILED)


def _write_tables(rows: list[report.Row], folder: Path) -> None:
    report.write_text(folder / "sweep.csv", report.to_csv(rows))
    report.write_text(folder / "sweep.md", report.to_markdown(rows))


def _print_report(rows: list[report.Row], folder: Path) -> None:
    # Into a file or a pipe, rich would cut the table at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else 200, highlight=False)
    console.print()
    console.print(report.to_rich(rows))
    for line in report.notes(rows):
        console.print(line, markup=False)
    console.print(f"sweep.csv, sweep.md, memory_vs_length.png in {folder}", markup=False)
