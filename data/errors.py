"""The error of a corpus, tokeniser or length that a run cannot use."""

from pathlib import Path


class DataError(ValueError):
    """The message is one sentence: which key, what was given, what is accepted."""


def damaged(folder: Path) -> DataError:
    """The error of a token cache that is not as it was written."""
    return DataError(f"the token cache {str(folder)!r} is damaged; delete that folder")


def first_line(error: Exception) -> str:
    """What a library's many-line error says first."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
