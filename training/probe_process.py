"""Trials in processes of their own: started, given their time, ended; and kept in files."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from training import report
from training.longest_search import Probe

ROOT = Path(__file__).resolve().parents[1]
PROBE = (sys.executable, "-m", "training.probe")
START_S = 300.0  # seconds for all that comes before the first step
FIRST_STEP_S = 30.0  # more for the first step at a length, in which kernels may be compiled
WARMUPS = 4  # steps' time that the warm-up may take: that of a compiled model has the whole length
WINDOWS = sys.platform == "win32"

Tell = Callable[..., None]  # of keywords: one line of JSON


def take_job() -> tuple[dict[str, Any], Tell]:
    """In a trial's process: its job, and what tells how it goes.

    Whatever is printed goes to the log from here on, and the process ends when the one that
    started it does.
    """
    lines, sys.stdout = os.fdopen(os.dup(1), "w"), sys.stderr
    os.dup2(2, 1)  # for what is printed by libraries that are not Python's
    job = json.loads(sys.stdin.buffer.raw.readline())  # unbuffered: the rest is for the thread
    threading.Thread(target=_end_with_parent, daemon=True).start()

    def tell(**values: Any) -> None:
        lines.write(json.dumps(values) + "\n")
        lines.flush()

    return job, tell


def _end_with_parent() -> None:
    os.read(0, 1)  # nothing more is ever written: this returns when the other end is closed
    os._exit(1)


class ProbeRunner:
    """Runs trials one after the other; as a context manager, leaves no process behind.

    On a GPU the next trial's process is started while one runs: it imports PyTorch, which takes
    seconds, and waits, without touching the GPU. On a CPU it would be in the other's way.
    """

    def __init__(self, folder: Path, command: tuple[str, ...] = PROBE) -> None:
        self.folder = folder
        self.command = command
        self._ahead = False
        self._spare: _Process | None = None
        self._started = 0

    def __enter__(self) -> "ProbeRunner":
        for left in self.folder.glob("process_*.log"):  # by a search that was killed
            left.unlink()
        return self

    def __exit__(self, *_: object) -> None:
        if self._spare:
            self._spare.end()
            self._spare.log.unlink(missing_ok=True)

    def run(self, job: dict[str, Any], log: Path) -> dict[str, Any]:
        """The result of a trial, whatever happens to its process; what it printed is in ``log``.

        job: see ``training.probe``. A step that takes longer than ``limit_s`` is a "timeout"; a
        process that dies, or begins no step, an "error".
        """
        process, self._spare = self._spare or self._start(), None
        result = {key: job[key] for key in ("seq_len", "cap_bytes", "limit_s")}
        try:
            process.send(job)
            if self._ahead:
                self._spare = self._start()
            result |= process.result(job["limit_s"])
        finally:
            process.end()
            os.replace(process.log, log)
        if result["status"] == "crashed":
            result |= {"status": "error", "message": _how_it_died(process.returncode, log)}
        self._ahead = result.get("device") == "cuda"
        return result

    def _start(self) -> "_Process":
        self._started += 1
        return _Process(self.command, self.folder / f"process_{self._started}.log")


class _Process:
    """A process that takes a job and tells, line by line, how it goes."""

    def __init__(self, command: tuple[str, ...], log: Path) -> None:
        self.log = log
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # it ends when this does: with us
                stdout=subprocess.PIPE,
                stderr=file,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # the terminal's Ctrl-C is for the search alone
            )
        self._lines: queue.Queue[bytes | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def returncode(self) -> int:
        return self._process.returncode

    def send(self, job: dict[str, Any]) -> None:
        with suppress(BrokenPipeError):  # it has died; its result says so
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()

    def result(self, limit_s: float) -> dict[str, Any]:
        """Its last line, or a status of our own: "crashed", "timeout" or "error"."""
        allowed, steps = START_S + WARMUPS * limit_s, 0
        while True:
            try:
                line = self._lines.get(timeout=allowed)
            except queue.Empty:
                if steps:
                    return {"status": "timeout", "message": f"a step took over {limit_s:g} s"}
                return {"status": "error", "message": f"no step began in {allowed:.0f} s"}
            if line is None:
                self._process.wait()
                return {"status": "crashed"}
            said = json.loads(line)
            if "status" in said:
                return said
            steps = said["number"]
            allowed = limit_s + (FIRST_STEP_S if steps == 1 else 0)

    def end(self) -> None:
        """Kill it and all that it started."""
        with suppress(ProcessLookupError):
            if WINDOWS:
                self._process.kill()
            else:
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                pipe.close()

    def _read(self) -> None:
        for line in self._process.stdout:
            if line.endswith(b"\n"):  # else it died while it wrote
                self._lines.put(line)
        self._lines.put(None)


def _how_it_died(return_code: int, log: Path) -> str:
    if return_code < 0:
        name = signal.Signals(-return_code).name
        hint = " (often the system's answer to memory running out)" if name == "SIGKILL" else ""
        how = f"killed by {name}{hint}"
    else:
        how = f"ended with exit code {return_code}"
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "nothing was printed")
    return f"{how}; last line: {last}"


class ProbeStore:
    """The trials of one variant, a file each, so that an interrupted search goes on.

    What failed is not kept: it is tried again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def load(self) -> list[Probe]:
        files = sorted(self.folder.glob("probe_*.json"))
        probes = [Probe.of(json.loads(file.read_text(encoding="utf-8"))) for file in files]
        return [probe for probe in probes if probe.status in ("ok", "oom", "timeout")]

    def file(self, seq_len: int, cap_bytes: int | None, suffix: str) -> Path:
        cap = "" if cap_bytes is None else f"_cap{cap_bytes}"
        return self.folder / f"probe_{seq_len}{cap}{suffix}"

    def save(self, result: dict[str, Any]) -> Probe:
        file = self.file(result["seq_len"], result["cap_bytes"], ".json")
        report.write_text(file, json.dumps(result, indent=2) + "\n")
        return Probe.of(result)
