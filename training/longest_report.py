"""Tables and plot of the longest lengths that train: a row for each variant on each card."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from training import report
from training.longest_search import FAILED, MEMORY, TIME, Answer, Probe
from training.run_folder import replacing
from training.units import GIB, in_gib

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME = "longest_context"
BOUNDS = {
    MEMORY: "memory",
    TIME: "time",
    "largest": "largest asked",
    FAILED: "failed",
    "searching": "not searched to the end",
}
HEADINGS = ("variant", "card (GiB)", "longest N", "bound by", "peak (GiB)", "s/step", "tokens/s")


@dataclass(frozen=True)
class Row:
    """What is known of a variant on a card of ``cap_bytes``; None is the whole device.

    ``refuted``: the shortest length that does not train, where one is known.
    """

    variant: str
    cap_bytes: int | None
    answer: Answer
    trials: int

    @property
    def card(self) -> str:
        return "all" if self.cap_bytes is None else f"{self.cap_bytes / GIB:g}"

    @property
    def longest(self) -> str:
        """The longest length; only at least so long where the search has not ended."""
        if self.answer.bound == FAILED:
            return "-"
        if self.answer.bound == "searching":
            return f"≥ {self.answer.seq_len:,}" if self.answer.seq_len else "-"
        return f"{self.answer.seq_len:,}"

    def note(self) -> str | None:
        """What the number alone does not say."""
        name, ended = f"{self.variant}, card {self.card}", self.answer.ended_by
        if self.answer.bound == FAILED:
            before = self.answer.seq_len
            so_far = f"; {before:,} tokens trained before" if before else ""
            return f"{name}: failed at {ended.seq_len:,} tokens ({ended.message}){so_far}"
        if self.answer.bound == MEMORY:
            nothing = "" if self.answer.longest else "no length fits; "
            return f"{name}: {nothing}no room at {ended.seq_len:,} tokens{_what_for(ended)}"
        if self.answer.bound == TIME and not self.answer.longest:
            return f"{name}: even {ended.seq_len:,} tokens take longer than the limit"
        return None


def _what_for(probe: Probe) -> str:
    if probe.status == "ok":
        return f" ({in_gib(probe.allocated_bytes)} GiB allocated with more memory)"
    if not probe.oom_tried_bytes:
        return f" ({report.first_line(probe.message or '')})"
    return (
        f" for {in_gib(probe.oom_tried_bytes)} GiB in "
        f"{report.place(probe.oom_where, probe.oom_frame)} "
        f"beside {in_gib(probe.oom_allocated_bytes)} GiB"
    )


def write_tables(rows: list[Row], folder: Path, about: list[str]) -> None:
    """CSV and Markdown of the rows so far; ``about``: sentences on how they were made."""
    report.write_text(folder / f"{NAME}.csv", to_csv(rows))
    report.write_text(folder / f"{NAME}.md", to_markdown(rows, about))


def write_plot(rows: list[Row], folder: Path) -> None:
    with replacing(folder / f"{NAME}.png") as partial:
        plot(rows).savefig(partial, format="png", dpi=130)


def to_csv(rows: list[Row]) -> str:
    """Bytes and seconds in full; an empty ``longest_seq_len`` where a trial failed."""
    lines = []
    for row in rows:
        best, ended, known = row.answer.longest, row.answer.ended_by, row.answer.bound != FAILED
        lines.append(
            {
                "variant": row.variant,
                "cap_bytes": row.cap_bytes,
                "longest_seq_len": row.answer.seq_len if known else None,
                "bound": row.answer.bound,
                "trained_seq_len": row.answer.seq_len,
                "ended_by_seq_len": ended and ended.seq_len,
                "ended_by": ended and _ended_by(ended),
                "peak_allocated_bytes": best and best.allocated_bytes,
                "peak_reserved_bytes": best and best.reserved_bytes,
                "seconds_per_step": best and best.seconds_per_step,
                "measured_cap_bytes": best and best.cap_bytes,
                "trials": row.trials,
                "device_name": best and best.device_name,
            }
        )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _ended_by(probe: Probe) -> str:
    if probe.status == "ok":  # it trained, but not within the limit or the card
        return f"{probe.seconds_per_step:.1f} s, {in_gib(probe.allocated_bytes)} GiB allocated"
    return " ".join((probe.message or probe.status).split())


def _cells(row: Row) -> list[str]:
    cells = [row.variant, row.card, row.longest, BOUNDS[row.answer.bound]]
    best = row.answer.longest
    if best is None or row.answer.bound == FAILED:
        return [*cells, "-", "-", "-"]
    seconds = best.seconds_per_step
    return [
        *cells,
        in_gib(best.allocated_bytes),
        f"{seconds:.3g}",
        f"{best.seq_len / seconds:,.0f}",
    ]


def _by_card(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and lines of the table with a column for each card."""
    cards = list(dict.fromkeys(row.card for row in rows))
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(row.variant, {})[row.card] = row.longest
    headings = ["longest N"] + [f"{card} GiB" if card != "all" else "all memory" for card in cards]
    return headings, [[v, *(of.get(card, "-") for card in cards)] for v, of in found.items()]


def _several_cards(rows: list[Row]) -> bool:
    return len({row.card for row in rows}) > 1


def notes(rows: list[Row]) -> list[str]:
    found = [note for note in (row.note() for row in rows) if note]
    devices = {p.device_name for row in rows if (p := row.answer.longest)}
    if len(devices) > 1:
        found.append(f"these numbers are of several devices: {', '.join(sorted(devices))}")
    return found


def to_markdown(rows: list[Row], about: list[str]) -> str:
    parts = []
    if _several_cards(rows):
        parts.append(_markdown_table(*_by_card(rows)))
    parts.append(_markdown_table(list(HEADINGS), [_cells(row) for row in rows]))
    parts.append("".join(f"- {note}\n" for note in [*about, *notes(rows)]))
    return "\n".join(parts)


def _markdown_table(headings: list[str], lines: list[list[str]]) -> str:
    table = [headings, ["---"] * len(headings), *lines]
    escaped = ([cell.replace("|", "\\|") for cell in line] for line in table)
    return "".join(f"| {' | '.join(line)} |\n" for line in escaped)


def to_rich(rows: list[Row]) -> list[Table]:
    """The same tables for the terminal."""
    tables = []
    if _several_cards(rows):
        tables.append(_rich_table(*_by_card(rows), left=1))
    tables.append(_rich_table(list(HEADINGS), [_cells(row) for row in rows], left=1))
    return tables


def _rich_table(headings: list[str], lines: list[list[str]], left: int) -> Table:
    table = Table()
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right")
    for line in lines:
        table.add_row(*map(Text, line))  # "[...]" in an override is no markup
    return table


def plot(rows: list[Row]) -> "Figure":
    """A bar for each variant and card: the longest N, on a logarithmic axis, a colour a card."""
    # Imported here: this module is loaded before it is known whether there is anything to draw.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    variants = list(dict.fromkeys(row.variant for row in rows))
    cards = list(dict.fromkeys(row.card for row in rows))
    height = 0.8 / len(cards)
    figure = Figure(
        figsize=(10, 1.6 + 0.3 * len(variants) * max(2, len(cards))), layout="constrained"
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in rows:
        index = cards.index(row.card)
        y = variants.index(row.variant) + (index - (len(cards) - 1) / 2) * height
        known = row.answer.bound != FAILED and row.answer.seq_len
        if known:
            axes.barh(y, row.answer.seq_len, height * 0.9, color=f"C{index}")
        text = f"{row.longest} ({BOUNDS[row.answer.bound]})"
        # Beside the bar, or at the axis where there is none.
        x, transform = (
            (row.answer.seq_len, axes.transData) if known else (0, axes.get_yaxis_transform())
        )
        axes.annotate(text, (x, y), (4, 0), transform, "offset points", va="center", fontsize=8)
    lengths = [row.answer.seq_len for row in rows if row.answer.seq_len] or [1]
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
    axes.tick_params(axis="x", labelrotation=30)
    room = 2 ** (max(len(text.get_text()) for text in axes.texts) / 7)  # for them beside the bars
    axes.set_xlim(min(lengths) / 2, max(lengths) * room)
    axes.set_yticks(range(len(variants)), variants)
    axes.invert_yaxis()
    axes.set(title="Longest sequence that trains (batch 1)", xlabel="N: sequence length (tokens)")
    axes.grid(alpha=0.3, axis="x")
    if len(cards) > 1:
        names = ["all memory of the device" if card == "all" else f"{card} GiB" for card in cards]
        colours = [Patch(color=f"C{index}") for index in range(len(cards))]
        figure.legend(colours, names, loc="outside lower center", ncols=len(cards), fontsize=9)
    return figure
