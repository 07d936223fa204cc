"""Measures the peak memory of one training step for each combination of settings, on this GPU.

python scripts/measure_memory.py model=gpt2_small attention=naive,flash_v1 seq_len=1024,4096,16384
python scripts/check_prediction.py memory.csv --out results/prediction

key=value: those of train.py; several values, separated by commas, make a row for each combination.
Each point is a process of its own (training/probe.py): a few short steps to warm up, then one whole
optimizer step on one sequence of random tokens, whose peaks are written. Out of memory is a row
too. The file is written anew after each point.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from scripts.common import csv_file
from scripts.common.arguments import check_out, file_name, positive_number
from scripts.common.ending import ended
from training.cli import one_sentence
from training.compose import combinations, composed
from training.devices import resolve_hardware
from training.errors import EXIT_FAILED, ConfigError
from training.probe_process import ProbeRunner
from training.signals import sigterm_interrupts
from training.units import in_gib

console = Console(highlight=False, soft_wrap=True, markup=False)
MEASURED = (
    "status",
    "allocated_bytes",
    "reserved_bytes",
    "capacity_bytes",
    "message",
    "device_name",
)
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of train.py")
    parser.add_argument(
        "--limit",
        type=positive_number,
        default=120.0,
        metavar="S",
        help="longest step (default: 120 s)",
    )
    parser.add_argument(
        "--out", type=file_name, default="memory.csv", help="file to write (default: memory.csv)"
    )
    args = parser.parse_intermixed_args(argv)
    rows: list[Row] = []
    with one_sentence():
        points = [point(job) for job in combinations(args.overrides)]
    check_out(args.out, args.out)
    write(rows, args.out)
    with sigterm_interrupts():
        for row in measure(points, args.limit):
            rows.append(row)
            write(rows, args.out)
            peak = row["peak_allocated_bytes"]
            said = f"{in_gib(peak)} GiB" if peak else row["message"]
            console.print(f"{len(rows)}/{len(points)}  {row['overrides']}  {row['status']}  {said}")
    console.print(f"{len(rows)} points in {args.out}")
    return EXIT_FAILED if any(row["status"] not in ("ok", "oom") for row in rows) else 0


def point(overrides: list[str]) -> tuple[str, DictConfig]:
    """One sequence in a forward pass, one forward pass in a step: as typed, and its config.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: as train.py would; ConfigError too
            where it would run on a CPU.
    """
    from training.predict import with_changes  # loads Lightning, unlike --help

    cfg = composed(overrides)
    if resolve_hardware(cfg.device, cfg.precision).device != "cuda":
        raise ConfigError(f"device={cfg.device} is the CPU here; peaks are measured on a CUDA GPU")
    sizes = {"global_batch_tokens": cfg.seq_len, "micro_batch_tokens": 1}
    typed = [*overrides, *(f"{key}={value}" for key, value in sizes.items())]
    return " ".join(typed), with_changes(cfg, sizes)


def measure(points: list[tuple[str, DictConfig]], limit_s: float) -> Iterator[Row]:
    """A row for each point, as it is measured."""
    with tempfile.TemporaryDirectory() as name, ProbeRunner(Path(name)) as runner:
        config, log = Path(name, "config.yaml"), Path(name, "log")
        for overrides, cfg in points:
            config.write_text(OmegaConf.to_yaml(cfg), encoding="utf-8")
            job = {"config": str(config), "seq_len": cfg.seq_len, "steps": 1}
            found = runner.run(job | {"limit_s": limit_s, "cap_bytes": None}, log)
            row = {_column(key): found.get(key) for key in MEASURED}
            yield {"overrides": overrides, **row}


def write(rows: list[Row], path: Path) -> None:
    csv_file.write(path, rows, csv_file.software(), columns=["overrides", *map(_column, MEASURED)])


def _column(key: str) -> str:
    """The name in a table of runs: ``peak_allocated_bytes``."""
    return f"peak_{key}" if key in ("allocated_bytes", "reserved_bytes") else key


if __name__ == "__main__":
    sys.exit(ended(main))
