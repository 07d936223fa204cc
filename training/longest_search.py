"""The longest sequence that trains: which lengths to try, and what each trial says about a card.

A length is tried by training at it (training/probe.py), and each trial is kept, so that a search
asks only for what no trial has answered: a smaller card's search begins with the larger one's.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

# What a trial says of a length: it trains, or why it does not.
FITS, MEMORY, TIME, FAILED = "fits", "memory", "time", "failed"
# How a trial ended; "refused": settings that no length can have.
STATUSES = ("ok", "oom", "timeout", "error", "refused")


@dataclass(frozen=True)
class Probe:
    """One trial: a training step at ``seq_len`` tokens, batch 1, in a process of its own.

    ``cap_bytes``: the memory it was allowed, None: all of the device's. ``allocated_bytes`` and
    ``reserved_bytes``: its peaks, as training/memory.py names them; on a CPU both are the peak
    resident set. ``capacity_bytes``: what there was to allocate. ``limit_s``: the time a step was
    given. ``message``: of a trial that ended other than ok, why.
    """

    seq_len: int
    status: str
    cap_bytes: int | None = None
    limit_s: float | None = None
    seconds_per_step: float | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    device: str | None = None  # cpu or cuda
    device_name: str | None = None
    message: str | None = None
    oom_tried_bytes: int | None = None
    oom_where: str | None = None
    oom_frame: str | None = None
    oom_allocated_bytes: int | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> "Probe":
        """From a dictionary; keys that are none of a probe's are left out."""
        return cls(**{k: v for k, v in values.items() if k in cls.__dataclass_fields__})

    def values(self) -> dict[str, Any]:
        return asdict(self)


def verdict(probe: Probe, cap_bytes: int | None, limit_s: float) -> str | None:
    """What a trial says of its length on a card of ``cap_bytes`` (None: the whole device) with
    ``limit_s`` seconds a step: FITS, MEMORY, TIME or FAILED; None: nothing, it must be tried there.

    What fitted fits a larger card, and a smaller one of at least the bytes reserved: these decide
    a real out-of-memory. What allocated more than a card has cannot fit it. In between only a trial
    knows, since the allocator gives back what it does not need before it gives up.
    """
    if probe.status == "timeout":
        return TIME if limit_s <= probe.limit_s else None
    if probe.status == "oom":
        return MEMORY if _within(cap_bytes, probe.cap_bytes) else None
    if probe.status != "ok":
        return FAILED
    if not _within(probe.cap_bytes, cap_bytes):  # it had more than this card
        if probe.allocated_bytes > cap_bytes:
            return MEMORY
        if probe.reserved_bytes > cap_bytes:
            return None
    return TIME if probe.seconds_per_step > limit_s else FITS


def _within(cap: int | None, other: int | None) -> bool:
    """Whether a card of ``cap`` bytes is no larger than the other; None is the whole device."""
    return other is None or (cap is not None and cap <= other)


@dataclass(frozen=True)
class Grid:
    """The lengths that may be tried, and how close the search comes.

    ``start``: tried first where nothing predicts a better one. ``largest``: none beyond it (None:
    memory or time must end the search). ``multiple``: of which all lengths are. The search ends
    when the shortest length that fails is at most ``tolerance`` of it above the longest that
    trains, or one ``multiple``.
    """

    start: int = 1024
    largest: int | None = None
    multiple: int = 256
    tolerance: float = 0.02

    def down(self, n: float) -> int:
        return int(n // self.multiple) * self.multiple

    def step(self, n: int) -> int:
        """How far apart lengths near ``n`` may stay."""
        return max(self.multiple, self.down(self.tolerance * n))


@dataclass(frozen=True)
class Answer:
    """What a search found for one variant on one card.

    ``longest``: the trial of the longest length that trains, None: none does (``seq_len`` 0).
    ``bound``: what forbids longer ones: MEMORY, TIME, "largest" (none was asked for), FAILED (a
    trial crashed: nothing is known beyond ``longest``), or "searching". ``ended_by``: the trial of
    the shortest length that does not train, or the one that failed.
    """

    longest: Probe | None
    bound: str
    ended_by: Probe | None = None

    @property
    def seq_len(self) -> int:
        return self.longest.seq_len if self.longest else 0


def search(
    probes: list[Probe],
    run: Callable[[int, int | None], Probe],
    grid: Grid,
    *,
    cap_bytes: int | None,
    limit_s: float,
    guess: Callable[[int], int | None] = lambda capacity_bytes: None,
    device_bytes: int | None = None,
) -> Answer:
    """Try lengths until the longest that trains is known.

    Args:
        probes: the variant's trials so far, whatever their cap; new ones are appended.
        run: ``(seq_len, cap_bytes) -> Probe``, a trial.
        cap_bytes: of the card in question; None: the whole device.
        guess: ``capacity_bytes -> seq_len``, about the longest that fits; None: it is not known.
            Two or three trials then do, where doubling and halving take a dozen.
        device_bytes: what the whole device has to allocate, where it is known before any trial.
    """
    trail: list[tuple[int, str]] = []  # this search's own trials: length, what it said
    while True:
        found = answer(probes, grid, cap_bytes, limit_s)
        if found.bound != "searching":
            return found
        whole = (p.capacity_bytes for p in probes if p.capacity_bytes and p.cap_bytes is None)
        capacity = cap_bytes or next(whole, None)
        estimates = _Estimates(probes, capacity or device_bytes, limit_s, guess)
        n = _next_length(found, grid, estimates, trail)
        probe = run(n, cap_bytes)
        probes.append(probe)
        said = verdict(probe, cap_bytes, limit_s)
        if said == FAILED:
            return Answer(found.longest, FAILED, probe)
        trail.append((n, said))


def answer(probes: Iterable[Probe], grid: Grid, cap_bytes: int | None, limit_s: float) -> Answer:
    """What the trials so far say; its bound is "searching" while that is not enough."""
    low, high = _bracket(probes, cap_bytes, limit_s)
    n = low.seq_len if low else 0
    if grid.largest is not None and n >= grid.down(grid.largest):
        return Answer(low, "largest", high)
    if high is None or high.seq_len - n > grid.step(high.seq_len):
        return Answer(low, "searching", high)
    return Answer(low, verdict(high, cap_bytes, limit_s), high)


def _bracket(
    probes: Iterable[Probe], cap_bytes: int | None, limit_s: float
) -> tuple[Probe | None, Probe | None]:
    """The longest that trains, and the shortest above it that does not."""
    said = [(p, verdict(p, cap_bytes, limit_s)) for p in probes]
    low = max((p for p, v in said if v == FITS), key=lambda p: p.seq_len, default=None)
    above = [p for p, v in said if v in (MEMORY, TIME) and p.seq_len > (low.seq_len if low else 0)]
    return low, min(above, key=lambda p: p.seq_len, default=None)


def _next_length(
    found: Answer, grid: Grid, estimates: "_Estimates", trail: list[tuple[int, str]]
) -> int:
    """The estimate, or what is nearest to it among the lengths that are still open.

    A wrong estimate costs little: after a few steps from it the search halves.
    """
    low, high = found.seq_len, found.ended_by.seq_len if found.ended_by else None
    by_memory, by_time = estimates.by_memory(low, high), estimates.by_time()
    same = _same_at_end(trail)
    if by_memory is None:
        n = _middle(low, high) if high else 2 * low or grid.start
        if by_time and not high:
            n = min(n, max(by_time, 1.25 * low))
    else:
        n = min(by_memory, by_time or by_memory)
        if not trail or trail[-1][1] == FITS:
            n = max(n, low + grid.step(low))
        elif high:
            n = min(n, high - grid.step(high))
        if high and not low < n < high:
            # Just inside of the end that it is beyond; half way where that was tried before.
            near = high - grid.step(high) if n >= high else low + grid.step(low)
            n = near if same <= 1 and low < near < high else _middle(low, high)
        if high and not low and found.ended_by.status == "timeout":
            n = min(n, _middle(low, high))  # how much too long it is, nothing tells
        if high and same > 3:
            n = _middle(low, high)
    if high:
        n = min(n, high - grid.multiple)
    if grid.largest is not None:
        n = min(n, grid.largest)
    return max(grid.down(n), low + grid.multiple)


def _middle(low: int, high: int) -> float:
    return (low + high) / 2 if high <= 4 * low else math.sqrt(max(low, high / 16) * high)


def _same_at_end(trail: list[tuple[int, str]]) -> int:
    """How many of the last trials, near each other, all fitted, or all did not."""
    count = 0
    for n, said in reversed(trail):
        last, last_said = trail[-1]
        if (said == FITS) != (last_said == FITS) or not 0.8 * last < n < 1.25 * last:
            break
        count += 1
    return count


MOST_AT_ONCE = 8  # times the longest that fitted: a fit says little about what is farther
FAR = 4  # times the longest trial that ended, for a fit of the time, which costs more to be wrong


class _Estimates:
    """About the longest length within memory, and within time; None where nothing tells."""

    def __init__(
        self,
        probes: list[Probe],
        capacity_bytes: int | None,
        limit_s: float,
        guess: Callable[[int], int | None],
    ) -> None:
        by_length = {p.seq_len: p for p in probes if p.status == "ok"}
        self.ok = [by_length[n] for n in sorted(by_length)]
        self.capacity_bytes = capacity_bytes
        self.limit_s = limit_s
        self.guess = guess

    def by_memory(self, low: int, high: int | None) -> int | None:
        """The guess, until trials come near it; then, or without one, what their peaks fit to.

        A guess that is not even near the bracket of the trials is no longer believed.
        """
        if not self.capacity_bytes:
            return None
        guess = self.guess(self.capacity_bytes)
        fitted = self._fitted()
        if guess is None or (fitted is not None and self.ok[-1].seq_len > guess / 2):
            return fitted
        return fitted if low and high and guess > 1.05 * high else guess

    def _fitted(self) -> int | None:
        """Of a parabola through the peaks of the shortest, a middle and the longest length."""
        if len(self.ok) < 3:
            return None
        first, *between, last = self.ok
        centre = math.sqrt(first.seq_len * last.seq_len)
        middle = min(between, key=lambda p: abs(p.seq_len - centre))
        points = [(p.seq_len, p.allocated_bytes) for p in (first, middle, last)]
        n = reaches(points, self.capacity_bytes)
        return None if n is None else int(min(n, MOST_AT_ONCE * last.seq_len))

    def by_time(self) -> int | None:
        """Far from the longest trial that ended, an estimate by two is not believed: what is within
        the limit if time grows as N^2, as it does at most, costs less to try than what takes too
        long."""
        if not self.ok:
            return None
        points = [(p.seq_len, p.seconds_per_step) for p in self.ok[-2:]]
        n = within_seconds(points, self.limit_s)
        return int(n if n <= FAR * points[-1][0] else within_seconds(points[-1:], self.limit_s))


def reaches(points: list[tuple[int, float]], y: float) -> float | None:
    """Where the parabola through three points, sorted by n, reaches ``y``; None where it does not.

    One that bends down is taken for the straight line through the last two points.
    """
    (n1, y1), (n2, y2), (n3, y3) = points
    slope, earlier = (y3 - y2) / (n3 - n2), (y2 - y1) / (n2 - n1)
    bend = max(0.0, (slope - earlier) / (n3 - n1))
    slope += bend * (n3 - n2)  # at n3
    square = slope**2 + 4 * bend * (y - y3)
    if slope <= 0 or square < 0:
        return None
    return n3 + 2 * (y - y3) / (slope + math.sqrt(square))


def within_seconds(points: list[tuple[int, float]], seconds: float) -> float:
    """The n of which a step takes so long, by the last one or two (n, seconds), sorted by n.

    ``t = b n + c n^2``, neither below 0: a straight line where the time per token is no longer than
    at the point before, a parabola through 0 from one point.
    """
    n, t = points[-1]
    b, c = 0.0, t / n**2
    if len(points) > 1:
        n1, t1 = points[-2]
        c = max(0.0, (t / n - t1 / n1) / (n - n1))
        b = max(0.0, t / n - c * n)
        c = (t / n - b) / n
    return 2 * seconds / (b + math.sqrt(b**2 + 4 * c * seconds))
