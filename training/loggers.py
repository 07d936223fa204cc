"""Where metrics go: metrics.csv always, Weights & Biases unless it is switched off."""

import csv
import netrc
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lightning.pytorch.loggers import Logger, WandbLogger
from omegaconf import DictConfig, OmegaConf

from training.console import console
from training.resume import Resumed
from training.run_folder import replacing

if TYPE_CHECKING:
    import wandb

CSV_NAME = "metrics.csv"
CONNECT_SECONDS = 30


class CsvLogger(Logger):
    """``metrics.csv``: one line per call, each written at once, so that a killed run keeps them.

    With ``resumed`` the file starts with the earlier run's lines up to the checkpoint's step.
    """

    def __init__(self, folder: str | Path, resumed: Resumed | None = None) -> None:
        super().__init__()
        self.path = Path(folder) / CSV_NAME
        rows = _rows_until(resumed.run_dir / CSV_NAME, resumed.step) if resumed else []
        self._columns = ["step"]
        for row in rows:
            self._add_columns(row)
        self._rewrite(rows)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        """Nothing: the config is in the run folder already."""

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        row = {"step": step, **{key: float(value) for key, value in metrics.items()}}
        if self._add_columns(row):
            self._rewrite(_read(self.path))
        with open(self.path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns, restval="").writerow(row)

    def _add_columns(self, row: dict[str, Any]) -> bool:
        new = [key for key in row if key not in self._columns]
        self._columns += new
        return bool(new)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with (
            replacing(self.path) as partial,
            open(partial, "w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, self._columns, restval="")
            writer.writeheader()
            writer.writerows(rows)


def make_loggers(cfg: DictConfig, resumed: Resumed | None) -> list[Logger]:
    """The loggers of a run, told its config."""
    loggers: list[Logger] = [CsvLogger(cfg.run_dir, resumed)]
    if cfg.logger.wandb:
        loggers.append(make_wandb(cfg.logger.wandb, cfg.run_dir, resumed))
    try:
        for logger in loggers:
            logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    except BaseException:
        finish(loggers, exit_code=1, summary={})  # nobody else knows of them yet
        raise
    return loggers


def make_wandb(settings: DictConfig, run_dir: str, resumed: Resumed | None) -> WandbLogger:
    """Starts the W&B run; a resumed run goes on under the id of the earlier one."""
    run = start_wandb(
        settings,
        run_dir,
        id=resumed.about.get("wandb_id") if resumed else None,
        resume="allow",
    )
    run.define_metric("trainer/global_step")  # what WandbLogger calls the step
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


def start_wandb(settings: DictConfig, folder: str | Path, **more: Any) -> "wandb.Run":
    """A W&B run; offline when there is no key, or when the server cannot be reached.

    Args:
        settings: project, name and mode, as ``configs/logger/default.yaml`` has them.
        folder: where its files go.
        more: further arguments of ``wandb.init``.
    """
    import wandb  # takes a second that a run without it need not wait

    def start(mode: str) -> wandb.Run:
        return wandb.init(
            project=settings.project,
            name=settings.name,
            dir=folder,
            mode=mode,
            settings=wandb.Settings(silent=True, console="off", init_timeout=CONNECT_SECONDS),
            **more,
        )

    mode = wandb_mode(settings.mode)
    try:
        return start(mode)
    except wandb.Error as error:
        if mode != "online":
            raise
        console.print(f"W&B cannot be reached ({type(error).__name__}): this run is logged offline")
        return start("offline")


def log_report(
    settings: DictConfig, folder: Path, table: list[dict[str, Any]], plots: list[Path]
) -> None:
    """A W&B run of job type "sweep-report" with a sweep's table and plots.

    table: plain values by column, a row for each run of the sweep.
    """
    import wandb

    run = start_wandb(settings, folder, job_type="sweep-report")
    failed = True
    try:
        columns = list(dict.fromkeys(key for row in table for key in row))
        cells = [[row.get(column) for column in columns] for row in table]
        images = {plot.stem: wandb.Image(str(plot)) for plot in plots}
        # Mixed columns: a setting may be a number in one run and a text in another.
        run.log({"runs": wandb.Table(columns, cells, allow_mixed_types=True), **images})
        failed = False
    finally:
        run.finish(exit_code=int(failed))


def wandb_mode(mode: str) -> str:
    """What "auto" means here: WANDB_MODE if set, else online when a key is configured."""
    if mode != "auto":
        return mode
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    return "online" if _has_key() else "offline"


def wandb_id(loggers: list[Logger]) -> str | None:
    """The id of the W&B run, to be kept in checkpoints."""
    return next((l.experiment.id for l in loggers if isinstance(l, WandbLogger)), None)


def finish(loggers: list[Logger], *, exit_code: int, summary: dict[str, Any]) -> None:
    """Ends the W&B run as what it was: a failed one is shown as failed."""
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            logger.experiment.summary.update(summary)
            logger.experiment.finish(exit_code=exit_code)


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).netloc
    path = os.environ.get("NETRC") or Path.home() / ".netrc"
    try:
        return host in netrc.netrc(str(path)).hosts
    except (OSError, netrc.NetrcParseError):
        return False


def _read(path: Path) -> list[dict[str, str]]:
    """The rows of a file; a last line without its end was cut off by a kill and does not count."""
    with open(path, newline="", encoding="utf-8") as file:
        whole = [line for line in file if line.endswith("\n")]
    return list(csv.DictReader(whole))


def _rows_until(path: Path, step: int) -> list[dict[str, str]]:
    if not path.exists():
        return []
    return [row for row in _read(path) if int(row["step"]) <= step]
