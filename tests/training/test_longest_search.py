"""Which lengths are tried, against cards whose memory is a closed form of N."""

import math
import random

import pytest

from training.longest_search import (
    FAILED,
    FITS,
    MEMORY,
    TIME,
    Grid,
    Probe,
    answer,
    reaches,
    search,
    verdict,
    within_seconds,
)
from training.units import GIB

NAIVE = (2 * GIB, 500e3, 940.0)
FLASH = (2 * GIB, 930e3, 0.0)
DEVICE = 139 * GIB


class Card:
    """A device on which a step allocates ``a + b N + c N^2`` bytes, by a factor of up to ``noise``
    more or less, and takes ``seconds(N)``."""

    def __init__(self, form, seconds=lambda n: 0.01 + 1e-9 * n**2, noise=0.0, crashes=()):
        self.form = form
        self.seconds = seconds
        self.noise = noise
        self.crashes = crashes
        self.limit_s = 120.0
        self.asked = []

    def bytes(self, n: int) -> float:
        a, b, c = self.form
        noise = random.Random(n).uniform(-self.noise, self.noise) if self.noise else 0.0
        return (a + b * n + c * n**2) * (1 + noise)

    def run(self, n: int, cap: int | None) -> Probe:
        assert (n, cap) not in self.asked, "a trial that was made before"
        self.asked.append((n, cap))
        if n in self.crashes:
            return Probe(n, "error", cap, self.limit_s, message="killed by SIGSEGV")
        if self.bytes(n) > min(cap or DEVICE, DEVICE):
            return Probe(n, "oom", cap, self.limit_s)
        if self.seconds(n) > 2 * self.limit_s:
            return Probe(n, "timeout", cap, self.limit_s)
        used = int(self.bytes(n))
        return Probe(n, "ok", cap, self.limit_s, self.seconds(n), used, used, cap or DEVICE)

    def longest(self, multiple: int, cap: int | None = None) -> int:
        """By counting up."""
        n = 0
        while self.bytes(n + multiple) <= (cap or DEVICE) and (
            self.seconds(n + multiple) <= self.limit_s
        ):
            n += multiple
        return n


def find(card, grid=Grid(), probes=None, cap=None, **more):  # noqa: B008 (it is frozen)
    probes = [] if probes is None else probes
    return search(probes, card.run, grid, cap_bytes=cap, limit_s=card.limit_s, **more)


@pytest.mark.parametrize("form", [NAIVE, FLASH, (2 * GIB, 72e3, 0.0)])
def test_without_tolerance_the_longest_length_is_found_exactly(form):
    card = Card(form, seconds=lambda n: 1e-6 * n)
    found = find(card, Grid(tolerance=0))
    assert found.seq_len == card.longest(256)
    assert found.bound == MEMORY
    assert found.ended_by.seq_len == found.seq_len + 256


@pytest.mark.parametrize("cap", [None, 80 * GIB, 24 * GIB])
@pytest.mark.parametrize("form", [NAIVE, FLASH])
def test_within_the_tolerance_few_trials_do(form, cap):
    card = Card(form)
    found = find(card, cap=cap)
    longest = card.longest(256, cap)
    assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert found.longest.seq_len == found.seq_len
    assert len(card.asked) <= 8


@pytest.mark.parametrize("form", [NAIVE, FLASH])
@pytest.mark.parametrize("wrong", [0.97, 1.0, 1.03])
def test_a_good_guess_needs_four_trials(form, wrong):
    card = Card(form)
    guess = {DEVICE: int(wrong * card.longest(64))}
    found = find(card, guess=guess.get, device_bytes=DEVICE)
    longest = card.longest(256)
    assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert len(card.asked) <= 4
    assert card.asked[0][0] == 256 * (guess[DEVICE] // 256)


@pytest.mark.parametrize("wrong", [0.001, 0.3, 3, 1000])
def test_a_bad_guess_costs_trials_and_no_more(wrong):
    card = Card(FLASH)
    longest = card.longest(256)
    found = find(card, guess=lambda capacity: int(wrong * longest))
    assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert len(card.asked) <= 14


def test_a_smaller_card_uses_what_the_larger_one_showed():
    card, probes = Card(NAIVE), []
    find(card, probes=probes)
    first = len(card.asked)
    for cap in (80 * GIB, 40 * GIB, 24 * GIB):
        longest = card.longest(256, cap)
        found = find(card, probes=probes, cap=cap)
        assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert len(card.asked) - first <= 6


@pytest.mark.parametrize("form", [NAIVE, FLASH])
def test_a_larger_card_is_not_taken_for_the_smaller_one_that_was_searched_before(form):
    card, probes = Card(form), []
    find(card, probes=probes, cap=24 * GIB)
    first, longest = len(card.asked), card.longest(256)
    found = find(card, probes=probes)
    assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert len(card.asked) - first <= 5


def test_a_search_that_was_done_tries_nothing():
    card, probes = Card(FLASH), []
    found = find(card, probes=probes)
    card.asked.clear()
    assert find(card, probes=probes) == found
    assert card.asked == []


def test_an_interrupted_search_goes_on_without_repeating_a_trial():
    whole = Card(FLASH)
    expected = find(whole)
    for stop in range(1, len(whole.asked)):
        card, probes = Card(FLASH), []

        def interrupted(n, cap, card=card, stop=stop):
            if len(card.asked) == stop:
                raise KeyboardInterrupt
            return card.run(n, cap)

        with pytest.raises(KeyboardInterrupt):
            search(probes, interrupted, Grid(), cap_bytes=None, limit_s=120)
        assert len(probes) == stop
        assert answer(probes, Grid(), None, 120).bound == "searching"
        found = find(card, probes=probes)  # Card.run refuses a trial that was made before
        assert abs(found.seq_len - expected.seq_len) <= 0.02 * expected.seq_len


def test_the_time_limit_ends_a_search():
    card = Card((GIB, 1e3, 0.0), seconds=lambda n: 1e-5 * n + 1e-9 * n**2)
    found = find(card)
    # 1e-9 N^2 + 1e-5 N = 120
    longest = (-1e-5 + math.sqrt(1e-10 + 4e-9 * 120)) / 2e-9
    assert found.bound == TIME
    assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert len(card.asked) <= 9


@pytest.mark.parametrize("start", [1024, 4096])
@pytest.mark.parametrize(
    ("known", "too_long", "trials"),
    [
        (dict(guess=lambda capacity: 2_000_000), 1, 6),
        (dict(guess=lambda capacity: 2_000_000, device_bytes=DEVICE), 3, 6),  # begins with it
        (dict(), 2, 11),  # doubles
    ],
    ids=["guess", "guess first", "no guess"],
)
def test_where_time_ends_a_search_few_trials_take_too_long(known, too_long, trials, start):
    card = Card((2 * GIB, 67e3, 0.0), seconds=lambda n: 0.05 + 2e-5 * n + 1.9e-10 * n**2)
    found = find(card, Grid(start), **known)
    longest = card.longest(256)
    assert found.bound == TIME
    assert 0.98 * longest - 256 <= found.seq_len <= longest
    assert sum(card.seconds(n) > card.limit_s for n, _ in card.asked) <= too_long
    assert len(card.asked) <= trials


def test_a_length_that_took_longer_than_the_limit_does_not_count():
    card = Card((GIB, 1e3, 0.0), seconds=lambda n: 100 if n <= 1024 else 130)
    found = find(card)
    assert (found.seq_len, found.bound) == (1024, TIME)


def test_the_largest_length_asked_for_ends_a_search():
    card = Card(FLASH)
    found = find(card, Grid(largest=9000))
    assert (found.seq_len, found.bound) == (8960, "largest")
    assert max(n for n, _ in card.asked) == 8960


def test_a_card_too_small_for_anything_is_zero():
    card = Card((200 * GIB, 1e3, 0.0))
    found = find(card)
    assert (found.seq_len, found.longest, found.bound) == (0, None, MEMORY)
    assert found.ended_by.seq_len == 256


def test_a_crash_ends_the_search_and_is_no_limit():
    card = Card(FLASH, crashes=(4096,))
    probes = []
    found = find(card, probes=probes)
    assert (found.bound, found.seq_len) == (FAILED, 2048)
    assert found.ended_by.message == "killed by SIGSEGV"
    assert answer(probes, Grid(), None, 120).bound == "searching"


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_noise_does_not_keep_it_from_ending(noise):
    card = Card(FLASH, noise=noise)
    found = find(card, Grid(tolerance=0.001, multiple=128))
    assert len(card.asked) <= 40
    assert (found.seq_len, None) in card.asked
    assert card.bytes(found.seq_len) <= DEVICE < card.bytes(found.ended_by.seq_len)


CAP = 40 * GIB


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (dict(status="ok"), FITS),
        (dict(status="ok", cap_bytes=CAP), FITS),
        (dict(status="ok", cap_bytes=24 * GIB), FITS),  # it fits a smaller card
        (dict(status="ok", reserved_bytes=CAP + 1), None),  # would the allocator give some back?
        (dict(status="ok", cap_bytes=CAP, reserved_bytes=CAP + 1), FITS),  # it did
        (dict(status="ok", allocated_bytes=CAP + 1, reserved_bytes=CAP + 1), MEMORY),
        (dict(status="ok", seconds_per_step=11.0), TIME),
        (dict(status="oom"), MEMORY),
        (dict(status="oom", cap_bytes=CAP), MEMORY),
        (dict(status="oom", cap_bytes=CAP - 1), None),
        (dict(status="timeout"), TIME),
        (dict(status="timeout", limit_s=9.0), None),  # it was given less time
        (dict(status="error"), FAILED),
        (dict(status="refused"), FAILED),
    ],
)
def test_what_a_trial_says_of_a_card_of_40_gib_and_10_seconds(values, said):
    usual = dict(limit_s=10.0, seconds_per_step=1.0, allocated_bytes=GIB, reserved_bytes=2 * GIB)
    assert verdict(Probe(seq_len=1024, **{**usual, **values}), CAP, 10.0) == said


def test_a_cap_says_nothing_of_the_whole_device_that_failed():
    probe = Probe(1024, "oom", CAP, 10.0)
    assert verdict(probe, None, 10.0) is None


def test_a_parabola_is_followed_to_where_it_reaches():
    def y(n):
        return 7 + 3 * n + 0.5 * n**2

    assert reaches([(n, y(n)) for n in (1, 2, 4)], y(100)) == pytest.approx(100)
    assert reaches([(n, y(n)) for n in (10, 20, 40)], y(5)) == pytest.approx(5)
    line = [(n, 7 + 3 * n) for n in (1, 2, 4)]
    assert reaches(line, 307) == pytest.approx(100)
    assert reaches([(1, 3.0), (2, 2.0), (4, 1.0)], 10) is None  # it falls


def test_time_is_followed_by_its_last_two_points():
    def t(n):
        return 2e-3 * n + 1e-5 * n**2

    assert within_seconds([(100, t(100)), (300, t(300))], t(5000)) == pytest.approx(5000)
    assert within_seconds([(100, 1.0)], 120) == pytest.approx(100 * math.sqrt(120))
    assert within_seconds([(100, 1.0), (200, 5.0)], 20) == pytest.approx(400)  # b would be below 0
    assert within_seconds([(100, 1.0), (200, 1.0)], 120) == pytest.approx(24_000)
