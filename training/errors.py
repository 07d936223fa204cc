"""Errors that end a run with one readable line instead of a traceback."""

import os
import sys
from contextlib import suppress
from typing import NoReturn

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


class ConfigError(ValueError):
    """A setting the run cannot use. The message names the key, what was given, what is accepted."""


class DivergedError(ArithmeticError):
    """The loss is not a finite number any more; the message says at which step."""


def output_closed() -> int:
    """The exit code where whoever read the output has gone, as ``head`` does. Nothing more is to be
    said, nor to be complained of when Python empties its buffers."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_FAILED


def fail(message: str) -> NoReturn:
    """Ends the program with that line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(EXIT_BAD_INPUT)
