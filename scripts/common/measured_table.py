"""The table that a script prints of what it counted and, where it could, measured."""

from collections.abc import Container, Iterable, Sequence

from rich.table import Table


def measured_table(
    title: str, headings: Sequence[str], lines: Iterable[Sequence[str]], left: Container[str] = ()
) -> Table:
    """Numbers to the right, and the columns ``left`` to the left. What no line has a value for, as
    what only a GPU can measure, gets no column."""
    lines = list(lines)
    shown = [i for i in range(len(headings)) if any(line[i] for line in lines)]
    out = Table(title=title, title_justify="left")
    for i in shown:
        out.add_column(headings[i], justify="left" if headings[i] in left else "right")
    for line in lines:
        out.add_row(*(line[i] for i in shown))
    return out
