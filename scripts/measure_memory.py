"""Measures the peak memory of one training step for each combination of settings, on this GPU.

python scripts/measure_memory.py model=gpt2_small attention=naive,flash_v1 seq_len=1024,4096,16384
python scripts/check_prediction.py memory.csv --out results/prediction

key=value: those of train.py; several values, separated by commas, make a row for each combination.
Each point is a process of its own (training/probe.py): three short steps to warm up, then one whole
optimizer step on one sequence of random tokens, whose peaks are written. Out of memory is a row
too. --jobs lets points run together as long as their predicted peaks fit the GPU side by side: that
changes no peak, but makes the times worthless, so they are not written.
"""

import argparse
import csv
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.cli import explain, fail
from training.compose import combinations, composed
from training.console import console
from training.devices import versions
from training.errors import ConfigError
from training.predict import predict_peak, with_changes
from training.probe_process import ProbeRunner
from training.run_folder import replacing
from training.units import in_gib

COLUMNS = ("overrides", "status", "peak_allocated_bytes", "peak_reserved_bytes", "message")
ABOUT = ("device_name", "torch", "triton")
HEADROOM = 1.15  # of a predicted peak: what the allocator holds beyond it, and the CUDA context
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of train.py")
    parser.add_argument("--jobs", type=int, default=1, help="points at once (default: 1)")
    parser.add_argument(
        "--limit", type=float, default=120.0, metavar="S", help="longest step (default: 120 s)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("memory.csv"), help="file to write (default: memory.csv)"
    )
    args = parser.parse_intermixed_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs={args.jobs} must be at least 1")
    try:
        points = [point(job, args.jobs > 1) for job in combinations(args.overrides)]
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        fail(str(error) if isinstance(error, ConfigError) else explain(error))
    points.sort(key=lambda point: point.predicted)
    rows = measure(points, args.jobs, args.limit, lambda rows: write(rows, args.out))
    console.print(f"{len(rows)} points in {args.out}")
    return 1 if any(row["status"] not in ("ok", "oom") for row in rows) else 0


@dataclass(frozen=True)
class Point:
    """A combination of settings, and the bytes it is predicted to take (0: not predicted)."""

    overrides: str
    cfg: DictConfig
    predicted: int


def point(overrides: list[str], predicted: bool) -> Point:
    """One sequence in a forward pass, one forward pass in a step.

    Raises:
        ConfigError, HydraException, OmegaConfBaseException: as train.py would.
    """
    cfg = composed(overrides)
    sizes = {"global_batch_tokens": cfg.seq_len, "micro_batch_tokens": 1}
    cfg = with_changes(cfg, sizes)
    typed = " ".join([*overrides, *(f"{key}={value}" for key, value in sizes.items())])
    return Point(typed, cfg, predict_peak(cfg).peak_bytes if predicted else 0)


def measure(
    points: list[Point], jobs: int, limit_s: float, keep: Callable[[list[Row]], None]
) -> list[Row]:
    """A row for each point; ``keep`` is called with all rows so far after each."""
    room, rows, lock = Room(device_bytes()), [], threading.Lock()

    def one(folder: Path, point: Point) -> None:
        folder.mkdir()
        config = folder / "config.yaml"
        config.write_text(OmegaConf.to_yaml(point.cfg))
        job = {"config": str(config), "seq_len": point.cfg.seq_len, "steps": 1}
        job |= {"limit_s": limit_s, "cap_bytes": None}
        with room.share(HEADROOM * point.predicted), ProbeRunner(folder) as runner:
            found = runner.run(job, folder / "log")
        row = {
            "overrides": point.overrides,
            "status": found["status"],
            "peak_allocated_bytes": found.get("allocated_bytes"),
            "peak_reserved_bytes": found.get("reserved_bytes"),
            "message": found.get("message"),
            "device_name": found.get("device_name"),
        }
        with lock:
            rows.append(row)
            peak = row["peak_allocated_bytes"]
            said = f"{in_gib(peak)} GiB" if peak else row["message"]
            console.print(f"{len(rows)}/{len(points)}  {point.overrides}  {row['status']}  {said}")
            keep(rows)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(one, Path(folder, str(i)), point) for i, point in enumerate(points)]
        for task in tasks:
            task.result()
    return rows


class Room:
    """The memory of a device, given out to what runs on it."""

    def __init__(self, size: float) -> None:
        self.size = self.free = size
        self.changed = threading.Condition()

    @contextmanager
    def share(self, size: float) -> Iterator[None]:
        """So many bytes of it, waited for; what will not fit has it all for itself."""
        size = min(size, self.size)
        with self.changed:
            self.changed.wait_for(lambda: self.free >= size)
            self.free -= size
        try:
            yield
        finally:
            with self.changed:
                self.free += size
                self.changed.notify_all()


def device_bytes() -> int:
    """Memory of the GPU that is free now; of a CPU, none: one point at a time."""
    import torch

    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


def write(rows: list[Row], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    about = {key: value for key, value in versions().items() if key in ABOUT}
    with replacing(path) as partial, open(partial, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *ABOUT], lineterminator="\n")
        writer.writeheader()
        writer.writerows(row | about for row in rows)


if __name__ == "__main__":
    sys.exit(main())
