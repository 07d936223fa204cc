"""The error of a corpus, tokeniser or length that a run cannot use."""


class DataError(ValueError):
    """The message is one sentence: which key, what was given, what is accepted."""
