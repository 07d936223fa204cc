"""Checks of arguments that end in one sentence: what was given, what is accepted."""

import math


def check_number(
    name: str,
    value: object,
    *,
    whole: bool = False,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> None:
    """Refuse ``value`` unless it is a finite number (``whole``: an int) within the bounds given.

    Raises TypeError for anything but a number and ValueError for one out of bounds.
    """
    bounds = {"at least": at_least, "above": above, "at most": at_most, "below": below}
    wanted = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    kind = "a whole number" if whole else "a number"
    sentence = f"{name}={value!r} must be {kind}" + (f", {wanted}" if wanted else "")
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise TypeError(sentence)
    within = (
        math.isfinite(value)
        and (at_least is None or value >= at_least)
        and (above is None or value > above)
        and (at_most is None or value <= at_most)
        and (below is None or value < below)
    )
    if not within:
        raise ValueError(sentence)
