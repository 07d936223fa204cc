"""How a run ended: summary.json whatever happened, one readable ending on the console."""

import json
import os
import shlex
import sys
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from lightning.pytorch.loggers import Logger
from omegaconf import DictConfig
from rich.table import Table

from data.errors import DataError
from training import loggers as run_loggers
from training.batching import BatchPlan
from training.checkpoint import NAME as CHECKPOINT
from training.cli import explain, full_traceback_wanted
from training.console import ValidationReport, console
from training.devices import Hardware, versions
from training.errors import EXIT_BAD_INPUT, ConfigError, DivergedError
from training.memory import is_out_of_memory
from training.out_of_memory import describe
from training.report import SUMMARY
from training.run_folder import held, replacing, unusable
from training.signals import sigterm_interrupts
from training.units import in_gib

EXIT_CODES = {"ok": 0, "error": 1, "diverged": 1, "oom": 3, "interrupted": 130}


class RunSummary:
    """Collects what a run is and did; as a context manager it turns any exception into a status.

    ``values`` is what ``summary.json`` holds: ``status`` (ok, oom, diverged, interrupted or error),
    ``exit_code``, ``error`` (a sentence, or null) and whatever ``update`` was given. At the end the
    file is written, the outcome printed and the loggers are finished with the exit code; no
    exception passes.

    An attempt that failed before it trained leaves the summary of the run that the folder already
    holds as it is.

    Attributes:
        earlier: the summary of that run; None if the folder holds no checkpoint, or no summary.
        start_step: the optimizer step the training starts from.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.run_dir = Path(run_dir)
        # Of the run, as soon as it has them: told of the end, and asked for their numbers.
        self.loggers: list[Logger] = []
        self.callbacks: list[L.Callback] = []
        self.values: dict[str, Any] = {
            "status": "running",
            "command": shlex.join(["python", *sys.argv]),
            "run_dir": str(self.run_dir),
            **_choices(),
            "versions": versions(),
        }
        self.earlier: dict[str, Any] | None = None  # of a run that the folder already holds
        self._held = ExitStack()
        self.start_step = 0
        self._started = time.monotonic()

    def update(self, **values: Any) -> None:
        self.values.update(values)

    @property
    def ended_well(self) -> bool:
        """Whether the folder already holds a run that did."""
        return self.earlier is not None and self.earlier["status"] == "ok"

    @property
    def validated_step(self) -> int | None:
        """The optimizer step of the last validation."""
        return next((c.step for c in self.callbacks if isinstance(c, ValidationReport)), None)

    def describe(self, cfg: DictConfig, hardware: Hardware, batch: BatchPlan) -> None:
        """What the run is, as soon as its settings are known to be good."""
        self.update(
            seq_len=batch.seq_len,
            tokens_per_step=batch.tokens_per_step,
            micro_batch_size=batch.micro_batch_size,
            accumulate=batch.accumulate,
            max_steps=cfg.max_steps,
            seed=cfg.seed,
            device=hardware.device,
            device_name=hardware.name,
            precision=hardware.precision,
            compile=cfg.compile,
        )

    def keep_earlier(self) -> dict[str, Any]:
        """Ends an attempt with nothing to do: the folder's summary stays, and is returned."""
        self.values = self.earlier
        console.print(f"nothing is left to train; {self.run_dir / SUMMARY} stays as it is")
        return self.values

    def __enter__(self) -> "RunSummary":
        self._held.enter_context(held(self.run_dir))
        self.earlier = self._read_earlier()
        self._held.enter_context(sigterm_interrupts())
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> bool:
        with self._held:
            return self._end(error)

    def _end(self, error: BaseException | None) -> bool:
        if self.values is self.earlier:
            return False
        status, message, code = outcome(error)
        if status == "interrupted" and not (self.run_dir / "checkpoints" / CHECKPOINT).exists():
            message = "stopped by Ctrl-C or a signal, before the first checkpoint"
        measured = self._measured()
        if status == "oom" and "oom_where" not in measured:  # outside of the training
            device = torch.device(self.values.get("device") or "cpu")
            measured |= describe(error, device)
        self.update(
            status=status,
            exit_code=code,
            error=message,
            wall_s=round(time.monotonic() - self._started, 3),
            **measured,
        )
        try:  # the result first: finishing may wait for a network
            keep = error is not None and self.earlier is not None and not self._trained()
            if not keep:
                self._write()
            if error is None:
                console.print(table(self.values))
            else:
                self._print_ending(status, message, code, error, log=not keep)
        finally:
            run_loggers.finish(self.loggers, exit_code=code, summary=numbers(self.values))
        return True

    def _write(self) -> None:
        try:
            write_json(self.run_dir / SUMMARY, self.values)
        except OSError as error:  # a full disk must not hide how the run ended
            print(f"error: {unusable(self.run_dir, error)}", file=sys.stderr)

    def _read_earlier(self) -> dict[str, Any] | None:
        file = self.run_dir / SUMMARY
        if not (file.exists() and (self.run_dir / "checkpoints" / CHECKPOINT).exists()):
            return None
        return json.loads(file.read_text(encoding="utf-8"))

    def _trained(self) -> bool:
        return self.values.get("steps", 0) > self.start_step

    def _measured(self) -> dict[str, Any]:
        """What the callbacks measured, also of a run that failed on the way."""
        measured: dict[str, Any] = {}
        for callback in self.callbacks:
            if hasattr(callback, "summary"):
                measured |= callback.summary()
        return measured

    def _print_ending(
        self, status: str, message: str, code: int, error: BaseException, log: bool
    ) -> None:
        if log and code == 1 and status == "error":
            file = self.run_dir / "error.log"
            with suppress(OSError):
                file.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
                message = f"{message}\nThe full traceback is in {file}"
        if status == "oom" and self.values.get("oom_tried_bytes"):
            where = filter(None, (self.values["oom_where"], self.values["oom_frame"]))
            message = f"{message} (in {': '.join(where)})"
        if full_traceback_wanted():
            traceback.print_exception(error)
        label = {"error": "error", "oom": "out of memory"}.get(status, status)
        print(f"{label}: {message}", file=sys.stderr)


def outcome(error: BaseException | None) -> tuple[str, str | None, int]:
    """Status, one sentence and exit code of a run that ended with ``error`` (None: it did not)."""
    if error is None:
        return "ok", None, EXIT_CODES["ok"]
    cause = error.__cause__
    if isinstance(error, InstantiationException) and isinstance(cause, ConfigError | DataError):
        error = cause
    if isinstance(error, ConfigError | DataError):
        return "error", str(error), EXIT_BAD_INPUT
    if isinstance(error, InstantiationException):
        return "error", explain(error), EXIT_BAD_INPUT
    if isinstance(error, DivergedError):
        return "diverged", str(error), EXIT_CODES["diverged"]
    if is_out_of_memory(error):
        return "oom", _first_line(error), EXIT_CODES["oom"]
    if isinstance(error, KeyboardInterrupt | SystemExit):  # Lightning exits on Ctrl-C and SIGTERM
        sentence = "stopped by Ctrl-C or a signal; the same command with resume=last goes on there"
        return "interrupted", sentence, EXIT_CODES["interrupted"]
    return "error", f"{type(error).__name__}: {_first_line(error)}", EXIT_CODES["error"]


def numbers(values: dict[str, Any]) -> dict[str, Any]:
    """What of the summary a logger shows: plain numbers and texts."""
    return {key: v for key, v in values.items() if isinstance(v, int | float | str)}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes the file under a temporary name first, so that it is never half there."""
    with replacing(path) as partial:
        partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def announce(v: dict[str, Any]) -> None:
    """What is about to run, in two lines."""
    console.print(
        f"{v['attention']}, {v['n_params'] / 1e6:.1f} million parameters, "
        f"on {v['device_name']} in {v['precision']}: {v['max_steps']:,} steps of "
        f"{v['tokens_per_step']:,} tokens in sequences of {v['seq_len']:,}"
    )
    console.print(f"outputs in {os.path.relpath(v['run_dir'])}")


def table(values: dict[str, Any]) -> Table:
    """The end of a good run at a glance."""
    rows = Table("", "", title="run summary", show_header=False, title_justify="left")
    rows.columns[0].no_wrap = True
    rows.columns[1].overflow = "fold"  # a long path is shown whole
    for label, text in _lines(values):
        if text is not None:
            rows.add_row(label, text)
    return rows


def _lines(v: dict[str, Any]) -> list[tuple[str, str | None]]:
    def shown(key: str, form: str) -> str | None:
        return None if v.get(key) is None else form.format(v[key])

    def gib(key: str) -> str | None:
        return None if v.get(key) is None else f"{in_gib(v[key])} GiB"

    first, last = shown("train_loss_first", "{:.3f}"), shown("train_loss_last", "{:.3f}")
    saved = gib("saved_attention_bytes")
    recall = shown("recall_accuracy", "{:.3f}")
    return [
        ("attention", v.get("attention")),
        ("model", f"{v['n_params'] / 1e6:.1f} million parameters"),
        ("device, precision", f"{v['device_name']}, {v['precision']}"),
        ("tokens per step", f"{v['tokens_per_step']:,} in sequences of {v['seq_len']:,}"),
        ("train loss (nats/token)", f"{first} -> {last}" if first else None),
        ("val loss (nats/token)", shown("val_loss", "{:.3f}")),
        ("bits per byte", shown("bits_per_byte", "{:.3f}")),
        ("recall accuracy", recall and f"{recall}, by chance {v['recall_chance']:.3g}"),
        ("tokens/s", shown("tokens_per_s", "{:,.0f}")),
        ("MFU", shown("mfu", "{:.1%}")),
        ("peak memory, allocated", gib("peak_allocated_bytes")),
        ("peak memory, reserved", gib("peak_reserved_bytes")),
        ("peak memory, process", gib("peak_rss_bytes")),
        (
            "saved for backward",
            saved and f"{saved} by attention, {gib('saved_total_bytes')} in all, per forward pass",
        ),
        ("outputs", os.path.relpath(v["run_dir"])),
    ]


def _choices() -> dict[str, str | None]:
    """The choices of the groups that matter, as soon as they are known."""
    if not HydraConfig.initialized():
        return {}
    choices = HydraConfig.get().runtime.choices
    groups = ("attention", "model", "loss", "data", "tokenizer")
    return {group: choices.get(group) for group in groups}


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
