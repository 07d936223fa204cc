"""Types of command line arguments that several scripts have."""


def positive(text: str) -> int:
    """An integer of at least 1; for argparse.

    Raises:
        ValueError: it is none.
    """
    value = int(text)
    if value < 1:
        raise ValueError
    return value
