"""Errors that end a run with one readable line instead of a traceback."""

import sys
from typing import NoReturn

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


class ConfigError(ValueError):
    """A setting the run cannot use. The message names the key, what was given, what is accepted."""


class DivergedError(ArithmeticError):
    """The loss is not a finite number any more; the message says at which step."""


def fail(message: str) -> NoReturn:
    """Ends the program with that line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
