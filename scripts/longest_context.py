"""Finds the longest sequence that trains on this device, for each attention and each card.

    python scripts/longest_context.py attention=naive,flash_v1 model=gpt2_small
    python scripts/longest_context.py attention=naive,flash_v1 --caps none,80,40,24 --limit 60
    python scripts/longest_context.py model=gpt2_small model.vocab_size=50304 \\
        --variant "naive: attention=naive" \\
        --variant "flash: attention=flash_v1" \\
        --variant "flash, all: attention=flash_v1 loss=chunked model.activation_checkpointing=block"

Settings (key=value) are those of train.py; a list, a,b, is a variant for each. A batch is one
sequence of random tokens. A length trains if a whole optimizer step (forward, backward, clipping,
AdamW with its state) does, in a process of its own, within the time limit. The search doubles from
--start, goes on where the peaks so far say that memory ends, and closes in from both sides.

Every trial is kept in the output folder, where the tables are written anew after each and the plot
after each row: the same command goes on after a stop; further caps and variants use what is there.

A cap limits what PyTorch's allocator may hold; the CUDA context (about half a GiB) is not in it. On
a CPU, where nothing is limited, the peak resident memory of the process is compared with the cap.
"""

import argparse
import hashlib
import re
import shlex
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file, from anywhere

from scripts.common.arguments import check_out, fraction, positive, positive_number
from scripts.common.ending import ended
from training import report
from training.cli import one_sentence
from training.errors import EXIT_FAILED, EXIT_INTERRUPTED, ConfigError
from training.longest_report import NAME, Row, notes, to_rich, write_plot, write_tables
from training.longest_search import FAILED, FITS, Grid, Probe, answer, search, verdict
from training.probe_process import ProbeRunner, ProbeStore
from training.run_folder import held
from training.signals import sigterm_interrupts
from training.units import GIB, in_gib

# What a trial depends on; the same trials serve whatever else a config says.
DECISIVE = (
    "attention",
    "model",
    "loss",
    "optim",
    "tokenizer",
    "trainer",
    "precision",
    "device",
    "compile",
    "deterministic",
)
console = Console(highlight=False, soft_wrap=True, markup=False)


@dataclass
class Variant:
    """A configuration whose longest length is searched."""

    name: str
    cfg: DictConfig
    folder: Path
    probes: list[Probe] = field(default_factory=list)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    with one_sentence():
        variants = make_variants(args.overrides, args.variant, args.start, args.out)
    check_out(args.out, *(args.out / f"{NAME}.{ending}" for ending in ("csv", "md", "png")))
    try:
        with one_sentence(), held(args.out, "--out"), sigterm_interrupts():
            return Search(variants, args).run()
    except KeyboardInterrupt:  # says more than `ended` does
        print("stopped; the same command goes on from here", file=sys.stderr)
        return EXIT_INTERRUPTED


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings of train.py; lists allowed")
    add(
        "--variant",
        action="append",
        default=[],
        metavar="'NAME: KEY=VALUE ...'",
        help="a named row with settings of its own, beside those that all share; may be repeated",
    )
    add(
        "--caps",
        type=caps,
        default=[None],
        metavar="GIB,...",
        help="cards to emulate, in GiB (2^30 bytes); none is the whole device (default: none)",
    )
    add(
        "--limit",
        type=positive_number,
        default=120.0,
        metavar="SECONDS",
        help="longest time of a step (default: 120)",
    )
    add(
        "--steps",
        type=positive,
        default=2,
        help="steps at each length, after three of 128 tokens that warm up; the last one's time "
        "counts, and the first of more than 20 s is the last (default: 2)",
    )
    add("--start", type=positive, default=1024, metavar="N", help="first length (default: 1024)")
    add("--largest", type=positive, metavar="N", help="try none beyond it (default: no such end)")
    add(
        "--multiple",
        type=positive,
        default=256,
        metavar="N",
        help="lengths tried are multiples of it (default: 256)",
    )
    add(
        "--tolerance",
        type=fraction,
        default=0.02,
        metavar="X",
        help="stop when a length that trains and one that does not are so near, as a part of it "
        "(default: 0.02), or one --multiple",
    )
    add(
        "--out",
        type=Path,
        default=Path(NAME),
        metavar="DIR",
        help="folder for trials, tables and plot (default: %(default)s)",
    )
    args = parser.parse_intermixed_args(argv)
    if args.largest is not None and args.largest < args.multiple:
        parser.error(f"--largest={args.largest} is no length; give at least {args.multiple}")
    if args.start < args.multiple or args.start > (args.largest or args.start):
        parser.error(
            f"--start={args.start} must be from --multiple={args.multiple} to --largest, if given"
        )
    return args


def caps(text: str) -> list[int | None]:
    """GiB, or none, to bytes; each once."""
    words = [word.strip().lower() for word in text.split(",")]
    try:
        found = [None if word == "none" else round(positive_number(word) * GIB) for word in words]
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not accepted; give numbers above 0, or none, separated by commas"
        ) from None
    return list(dict.fromkeys(found))


# --- variants ----------------------------------------------------------------------------------


def make_variants(shared: list[str], named: list[str], start: int, out: Path) -> list[Variant]:
    """Each named variant, in each combination of what is given as a list.

    Raises:
        ConfigError, HydraException: the first setting that no run can use.
    """
    from training.compose import combinations, composed, distinctions  # load PyTorch, unlike --help

    variants = []
    for name, own in [_split(text) for text in named] or [("", [])]:
        _check(shared + own)
        jobs = combinations(shared + own)
        for job, chosen in zip(jobs, distinctions(jobs), strict=True):
            full_name = ", ".join(filter(None, [name, chosen])) or _default_name(shared)
            cfg = composed([*job, f"seq_len={start}"])  # the trials replace the length
            variants.append(Variant(full_name, cfg, out / _folder(cfg)))
    repeated = {v.name for v in variants if [w.name for w in variants].count(v.name) > 1}
    if repeated:
        raise ConfigError(f"--variant: the name {repeated.pop()!r} is given twice; give another")
    return variants


def _split(text: str) -> tuple[str, list[str]]:
    name, colon, overrides = text.partition(":")
    if not (name.strip() and colon) or "=" in name:
        raise ConfigError(f"--variant={text!r} has no name; give 'NAME: KEY=VALUE ...'")
    return name.strip(), shlex.split(overrides)


def _check(overrides: list[str]) -> None:
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"{override} is no setting; give key=value")
        if re.match(r"\+*(model\.)?seq_len=", override):
            raise ConfigError(f"{override}: the search decides the length; give --start, --largest")


def _default_name(overrides: list[str]) -> str:
    return " ".join(overrides) or "the default config"


def _decisive(cfg: DictConfig) -> str:
    plain = OmegaConf.to_container(cfg, resolve=False)
    return OmegaConf.to_yaml({key: plain[key] for key in DECISIVE})


def _folder(cfg: DictConfig) -> str:
    """By what decides the trials, so that another name for the same finds them."""
    return hashlib.sha256(_decisive(cfg).encode()).hexdigest()[:12]


# --- the search --------------------------------------------------------------------------------


def first_guess(cfg: DictConfig, capacity_bytes: int) -> int | None:
    """About the longest length that fits a GPU of so many bytes; None where prediction fails, as it
    may for an attention of one's own: the search then doubles."""
    from training.predict import longest_that_fits, with_changes

    try:
        cfg = with_changes(cfg, {"global_batch_tokens": "auto"})  # a trial's step is one sequence
        return longest_that_fits(cfg, capacity_bytes)
    except Exception as error:
        message = report.first_line(str(error))
        console.print(f"the memory was not predicted ({type(error).__name__}: {message})")
        return None


class Search:
    """Searches every variant on every card; what is known is on disk after every trial.

    The plot, which takes longer to draw than a GPU should wait for, is there after every row.
    """

    def __init__(self, variants: list[Variant], args: argparse.Namespace) -> None:
        self.variants = variants
        self.args = args
        self.grid = Grid(args.start, args.largest, args.multiple, args.tolerance)
        self.failed: dict[tuple[str, int | None], Any] = {}

    def run(self) -> int:
        for variant in self.variants:
            store = ProbeStore(variant.folder)
            report.write_text(variant.folder / "config.yaml", OmegaConf.to_yaml(variant.cfg))
            variant.probes = store.load()
        with ProbeRunner(self.args.out) as runner, ExitStack() as at_end:
            at_end.callback(self._write)  # also when it is interrupted
            for variant in self.variants:
                variant.probes = ProbeStore(variant.folder).load()  # of another name, too
                # The largest card first: what its trials allocated answers for the smaller ones.
                for cap in sorted(self.args.caps, key=lambda c: (c is not None, -(c or 0))):
                    self._search(variant, cap, runner)
        rows = self.rows()
        out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
        for table in to_rich(rows):
            out.print(table)
        for line in [*self.about(), *notes(rows)]:
            console.print(line)
        console.print(f"{NAME}.csv, {NAME}.md, {NAME}.png in {self.args.out}")
        return EXIT_FAILED if self.failed else 0

    def _search(self, variant: Variant, cap: int | None, runner: ProbeRunner) -> None:
        store, known = ProbeStore(variant.folder), len(variant.probes)

        def run(seq_len: int, cap_bytes: int | None) -> Probe:
            write_tables(self.rows(), self.args.out, self.about())
            began = time.monotonic()
            job = {
                "config": str(variant.folder / "config.yaml"),
                "seq_len": seq_len,
                "steps": self.args.steps,
                "limit_s": self.args.limit,
                "cap_bytes": cap_bytes,
            }
            result = runner.run(job, store.file(seq_len, cap_bytes, ".log"))
            probe = store.save(result)
            self._say(variant, probe, time.monotonic() - began)
            return probe

        predicted = cache(lambda capacity_bytes: first_guess(variant.cfg, capacity_bytes))

        def guess(capacity_bytes: int) -> int | None:
            on_gpu = any(probe.device == "cuda" for probe in self._probes())
            return predicted(capacity_bytes) if on_gpu else None

        found = search(
            variant.probes,
            run,
            self.grid,
            cap_bytes=cap,
            limit_s=self.args.limit,
            guess=guess,
            device_bytes=next((p.capacity_bytes for p in self._probes() if not p.cap_bytes), None),
        )
        if found.bound == FAILED:
            self.failed[variant.name, cap] = found
        if len(variant.probes) > known:
            self._write()

    def _probes(self) -> list[Probe]:
        return [probe for variant in self.variants for probe in variant.probes]

    def rows(self) -> list[Row]:
        rows = []
        for variant in self.variants:
            for cap in self.args.caps:
                found = self.failed.get((variant.name, cap)) or answer(
                    variant.probes, self.grid, cap, self.args.limit
                )
                trials = sum(probe.cap_bytes == cap for probe in variant.probes)
                rows.append(Row(variant.name, cap, found, trials))
        return rows

    def about(self) -> list[str]:
        devices = sorted({probe.device_name for probe in self._probes() if probe.device_name})
        return [
            f"{', '.join(devices) or 'no trial yet'}; batch 1, one whole optimizer step within "
            f"{self.args.limit:g} s; lengths to {self.args.tolerance:.0%} or {self.args.multiple} "
            "tokens; GiB are 2^30 bytes, of live tensors on a GPU and resident on a CPU",
        ]

    def _write(self) -> None:
        write_tables(self.rows(), self.args.out, self.about())
        write_plot(self.rows(), self.args.out)

    def _say(self, variant: Variant, probe: Probe, seconds: float) -> None:
        card = "" if probe.cap_bytes is None else f", {probe.cap_bytes / GIB:g} GiB"
        said = verdict(probe, probe.cap_bytes, self.args.limit)
        text = {FITS: "trains", FAILED: "failed"}.get(said, f"does not train ({said})")
        if probe.status == "ok":
            text += f"  {in_gib(probe.allocated_bytes)} GiB  {probe.seconds_per_step:.3g} s/step"
        elif said == FAILED:
            text += f": {probe.message}"
        console.print(
            f"{variant.name}{card}  N = {probe.seq_len:,}  {text}  [{seconds:.0f} s in all]"
        )


if __name__ == "__main__":
    sys.exit(ended(main))
