"""Memory counters of the kernels of a small program, read by Nsight Compute (ncu).

The program calls torch.cuda.profiler.start() and stop() around what is to be counted. ncu picks a
unit for each metric (Gbyte, ms); base units are asked of it, and whatever it prints is converted.
"""

import csv
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]  # programs are run from here
SECTOR = 32  # bytes that L2 moves at a time

_DRAM_READ, _DRAM_WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
_L2 = "lts__t_sectors_srcunit_tex_op_{}.sum"  # what the processors ask of L2
_LOCAL = "l1tex__t_sectors_pipe_lsu_mem_local_op_{}.sum"  # spilled registers, in that too
_TIME = "gpu__time_duration.sum"
METRICS = (
    _DRAM_READ,
    _DRAM_WRITTEN,
    *(_L2.format(op) for op in ("read", "write", "red", "atom")),
    *(_LOCAL.format(op) for op in ("ld", "st")),
    _TIME,
)
_BYTES = {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9, "Tbyte": 1e12}
_SECONDS = {"nsecond": 1e-9, "usecond": 1e-6, "msecond": 1e-3, "second": 1}
_SECONDS |= {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1}
_COUNTS = {"sector": 1, "": 1}
UNITS = _BYTES | _SECONDS | _COUNTS


class NcuError(RuntimeError):
    """ncu did not count; the message is what it said."""


@dataclass(frozen=True)
class Kernel:
    """Bytes between L2 and DRAM, and between the processors and L2 (spilled registers included);
    atomic additions count as read and written by L2's adders."""

    name: str
    seconds: float
    dram_read: float
    dram_written: float
    l2_read: float
    l2_written: float
    spilled: float  # bytes of spilled registers, read and written, as they leave the L1


def find() -> str | None:
    """The path of ncu, or None."""
    places = [Path("/usr/local/cuda/bin/ncu"), *Path("/opt/nvidia").glob("nsight-compute/*/ncu")]
    return shutil.which("ncu") or next((str(p) for p in reversed(places) if p.exists()), None)


def profile(program: list[str], cache_control: str = "all", timeout_s: float = 120) -> list[Kernel]:
    """Runs the program under ncu and returns its kernels in the order of their launches.

    cache_control: "all" empties the caches before each kernel, so that a kernel is charged for
    what the one before left in L2 as well; "none" leaves them. Clocks stay as they are.

    Raises:
        NcuError: ncu is not there, may not read counters, counted nothing, or the program failed.
    """
    ncu = find()
    if ncu is None:
        raise NcuError("ncu (Nsight Compute) is not on this machine")
    with tempfile.TemporaryDirectory() as folder:
        report = str(Path(folder) / "report")
        _run(
            [
                ncu, "--profile-from-start", "off", "--clock-control", "none",
                "--cache-control", cache_control, "--metrics", ",".join(METRICS),
                "-o", report, *program,
            ],
            timeout_s,
        )  # fmt: skip
        shown = _run(
            [ncu, "-i", f"{report}.ncu-rep", "--page", "raw", "--csv", "--print-units", "base"],
            timeout_s,
        )
    kernels = parse(shown)
    if not kernels:
        raise NcuError(f"ncu counted no kernel of {' '.join(program)}")
    return kernels


def _run(command: list[str], timeout_s: float) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, cwd=ROOT)
    except subprocess.TimeoutExpired:
        raise NcuError(f"{' '.join(command)} took more than {timeout_s:.0f} s") from None
    if done.returncode:
        last = (done.stdout + done.stderr).strip().splitlines()[-8:]
        raise NcuError("\n".join([f"{' '.join(command)} failed:", *last]))
    return done.stdout


def parse(text: str) -> list[Kernel]:
    """The kernels in a raw page as CSV: names, then units, then a line for each kernel.

    Raises:
        NcuError: a metric is missing or has a unit that is not known.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = list(csv.reader(lines))
    if len(rows) < 3:
        return []
    names, units, *values = rows
    missing = [metric for metric in METRICS if metric not in names]
    if missing:
        raise NcuError(f"ncu's table lacks {', '.join(missing)}")
    return [_kernel(dict(zip(names, zip(row, units, strict=True), strict=True))) for row in values]


def _kernel(row: dict[str, tuple[str, str]]) -> Kernel:
    def number(metric: str) -> float:
        value, unit = row[metric]
        if unit not in UNITS:
            raise NcuError(f"{metric} has the unit {unit!r}; known are {', '.join(UNITS)}")
        try:
            return float(value.replace(",", "")) * UNITS[unit]
        except ValueError:
            raise NcuError(f"{metric} is {value!r}, which is no number") from None

    def sectors(pattern: str, *ops: str) -> float:
        return SECTOR * sum(number(pattern.format(op)) for op in ops)

    added = sectors(_L2, "red", "atom")
    return Kernel(
        name=row["Kernel Name"][0],
        seconds=number(_TIME),
        dram_read=number(_DRAM_READ),
        dram_written=number(_DRAM_WRITTEN),
        l2_read=sectors(_L2, "read") + added,
        l2_written=sectors(_L2, "write") + added,
        spilled=sectors(_LOCAL, "ld", "st"),
    )
