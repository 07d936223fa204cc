"""The error a user can mend: shown as one line, without a traceback."""


class ConfigError(ValueError):
    """A setting the run cannot use. The message names the key, what was given, what is accepted."""
