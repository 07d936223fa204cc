"""Fits of synthetic data whose answer is known."""

import numpy as np
import pytest

from training.fits import CannotFitError, last_exponent, polynomial, power_law, student_t

LENGTHS = [1024, 2048, 4096, 8192, 16384]


@pytest.mark.parametrize(
    ("dof", "published"),  # two-sided 95%, as every printed table of t has them
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (5, 2.571), (10, 2.228), (60, 2.000)],
)
def test_students_t_is_the_published_one(dof, published):
    assert student_t(dof) == pytest.approx(published, abs=6e-4)


def test_students_t_of_another_confidence():
    assert student_t(3, 0.99) == pytest.approx(5.841, abs=6e-4)


@pytest.mark.parametrize("power", [1, 1.5, 2])
def test_the_exponent_of_a_power_law(power):
    fit = power_law(LENGTHS, [3.0 * n**power for n in LENGTHS])
    assert fit.exponent.value == pytest.approx(power)
    assert fit.factor == pytest.approx(3.0)
    assert fit.exponent.half_width < 1e-7


def test_a_constant_that_is_given_is_subtracted():
    y = [5e9 + 24.0 * n**2 for n in LENGTHS]
    assert power_law(LENGTHS, y, 5e9).exponent.value == pytest.approx(2)
    assert power_law(LENGTHS, y).exponent.value < 1  # what a raw slope would claim


@pytest.mark.parametrize("power", [1, 2])
def test_a_constant_is_found_with_the_exponent(power):
    y = [7e6 + 30.0 * n**power for n in LENGTHS]
    fit = power_law(LENGTHS, y, constant=None)
    assert fit.exponent.value == pytest.approx(power, abs=1e-4)
    assert fit.constant == pytest.approx(7e6, rel=1e-3)


def test_a_polynomial_is_found_exactly():
    fit = polynomial(LENGTHS, [2e9 + 5e4 * n + 24 * n**2 for n in LENGTHS])
    assert [fit.a.value, fit.b.value, fit.c.value] == pytest.approx([2e9, 5e4, 24])
    known = polynomial(LENGTHS, [2e9 + 5e4 * n + 24 * n**2 for n in LENGTHS], constant=2e9)
    assert [known.b.value, known.c.value] == pytest.approx([5e4, 24])
    assert (known.a.value, known.a.stderr) == (2e9, 0)


def test_a_line_has_no_square_within_the_error_of_rounding():
    for b in range(1, 20000, 97):
        for fit in (
            polynomial(LENGTHS, [b * n for n in LENGTHS], constant=0),
            polynomial(LENGTHS, [12345678 + b * n for n in LENGTHS]),
        ):
            assert fit.c.low <= 0 <= fit.c.high
            assert fit.c.half_width < 1e-6 * (b + 12345678 / 1024)


def noisy(rng, b: float, c: float) -> np.ndarray:
    n = np.array(LENGTHS, dtype=float)
    return (b * n + c * n**2) * (1 + 0.02 * rng.standard_normal(len(n)))


def test_intervals_hold_the_truth_95_times_of_100():
    """5 lengths, 2 unknowns, relative errors of 2%: what the intervals were derived for."""
    rng = np.random.default_rng(0)
    trials = 1000
    held = {"exponent": 0, "b": 0, "c": 0}
    for _ in range(trials):
        fit = polynomial(LENGTHS, noisy(rng, 1e4, 10.0), constant=0)
        held["b"] += fit.b.low <= 1e4 <= fit.b.high
        held["c"] += fit.c.low <= 10.0 <= fit.c.high
        power = power_law(LENGTHS, noisy(rng, 0.0, 10.0)).exponent
        held["exponent"] += power.low <= 2 <= power.high
    for name, count in held.items():
        # 3 standard deviations of 1000 throws at 95% are 2.1%.
        assert count / trials == pytest.approx(0.95, abs=0.021), name


def test_the_interval_of_an_exponent_beside_a_fitted_constant_holds_the_truth():
    rng = np.random.default_rng(1)
    lengths = np.array([1024, 2048, 4096, 8192, 16384, 32768], dtype=float)
    trials = 50
    held = 0
    for _ in range(trials):
        y = (4e8 + 10 * lengths**2) * (1 + 0.005 * rng.standard_normal(6))
        exponent = power_law(lengths, y, constant=None).exponent
        held += exponent.low <= 2 <= exponent.high
    assert held / trials == pytest.approx(0.95, abs=0.092)  # 3 standard deviations


def test_errors_are_relative():
    """Half the value at the shortest length says as much as half of it at the longest."""
    wrong_short = [n * (1.2 if n == LENGTHS[0] else 1) for n in LENGTHS]
    wrong_long = [n * (1.2 if n == LENGTHS[-1] else 1) for n in LENGTHS]
    short, long = power_law(LENGTHS, wrong_short), power_law(LENGTHS, wrong_long)
    assert 1 - short.exponent.value == pytest.approx(long.exponent.value - 1)


@pytest.mark.parametrize(
    ("fit", "needed"),
    [
        (lambda n: power_law(n, n), 3),
        (lambda n: power_law(n, n, constant=None), 4),
        (lambda n: polynomial(n, n, constant=0), 3),
        (lambda n: polynomial(n, n), 4),
    ],
)
def test_too_few_lengths_are_refused_with_how_many_are_needed(fit, needed):
    with pytest.raises(CannotFitError, match=f"{needed - 1} lengths; .* at least {needed}"):
        fit(LENGTHS[: needed - 1])
    # The same length again is no other length.
    with pytest.raises(CannotFitError, match=f"at least {needed}"):
        fit(LENGTHS[: needed - 1] + LENGTHS[: needed - 1])


def test_a_value_below_the_constant_is_refused():
    for fit in (power_law, polynomial):
        with pytest.raises(CannotFitError, match="not above the constant"):
            fit(LENGTHS, LENGTHS, 5000)


def test_the_last_exponent_is_that_of_the_two_longest_lengths_above_the_constant():
    lengths = [1024, 4096, 2048, 4096]
    values = [7 + 1e6, 7 + 16.0 - 1, 7 + 4.0, 7 + 16.0 + 1]
    assert last_exponent(lengths, values, 7.0) == pytest.approx(2.0)
