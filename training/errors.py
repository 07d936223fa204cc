"""Errors that end a run with one readable line instead of a traceback."""


class ConfigError(ValueError):
    """A setting the run cannot use. The message names the key, what was given, what is accepted."""


class DivergedError(ArithmeticError):
    """The loss is not a finite number any more; the message says at which step."""
