"""How a quantity grows with sequence length: fitted exponents and polynomials, with intervals.

Both fits weigh relative errors alike (a residual of 1% counts the same at 1k and at 16k tokens) and
take their standard errors from the residuals, so an interval says how well the lengths measured
agree with the form that is fitted. Two unknowns need three lengths: without a residual there is no
error to state, and the fit is refused.

NumPy alone: SciPy would be a dependency for one number, Student's t, which has a closed form.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

CONFIDENCE = 0.95
# Byte counts are whole numbers, solved for in float64: a smaller relative error is rounding.
ROUNDING = 1e-9


class CannotFitError(ValueError):
    """There is nothing to fit; the message says why."""


@dataclass(frozen=True)
class Estimate:
    """A fitted value, its standard error, and the half width of its confidence interval."""

    value: float
    stderr: float
    half_width: float

    @property
    def low(self) -> float:
        return self.value - self.half_width

    @property
    def high(self) -> float:
        return self.value + self.half_width


@dataclass(frozen=True)
class PowerLaw:
    """``y = constant + factor * N^exponent``; ``constant`` was given or fitted."""

    exponent: Estimate
    factor: float
    constant: float
    points: int


@dataclass(frozen=True)
class Polynomial:
    """``y = a + b N + c N^2``; ``a`` was given (no error then) or fitted."""

    a: Estimate
    b: Estimate
    c: Estimate
    points: int


def power_law(
    lengths: Sequence[float], values: Sequence[float], constant: float | None = 0.0
) -> PowerLaw:
    """Fit ``values = constant + factor * N^exponent``.

    With a constant given this is a straight line through ``log(values - constant)`` over ``log N``.
    ``constant=None`` fits it too: one length more is needed, and the exponent is found up to 4.

    Args:
        lengths: N of each value; at least 3 different ones (4 to fit the constant).
        values: each greater than the constant.

    Raises:
        CannotFitError: too few lengths, or a value that is no greater than the constant.
    """
    n, y = _checked(lengths, values, unknowns=2 if constant is not None else 3)
    if constant is not None:
        _require_above(y, constant)
        columns = np.stack([np.ones_like(n), np.log(n)], axis=1)
        (log_factor, exponent), covariance = _least_squares(columns, np.log(y - constant))
        errors = _estimate(exponent, covariance[1, 1], len(n) - 2)
        return PowerLaw(errors, math.exp(log_factor), constant, len(n))
    exponent = _best_exponent(n, y)
    (constant, factor), _ = _least_squares(_power_columns(n, y, exponent), np.ones_like(y))
    # The error of the exponent, from the model's derivatives by constant, factor and exponent.
    slope = factor * n**exponent * np.log(n) / y
    columns = np.column_stack([_power_columns(n, y, exponent), slope])
    residuals = 1 - (constant + factor * n**exponent) / y
    covariance = _covariance(columns, residuals)
    return PowerLaw(_estimate(exponent, covariance[2, 2], len(n) - 3), factor, constant, len(n))


def last_exponent(lengths: Sequence[float], values: Sequence[float], constant: float) -> float:
    """The slope of ``log(values - constant)`` over ``log N`` between the two longest lengths; of
    several values of a length, their mean counts."""
    n, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64) - constant
    before, end = np.unique(n)[-2:]
    return float(np.log(y[n == end].mean() / y[n == before].mean()) / np.log(end / before))


def polynomial(
    lengths: Sequence[float], values: Sequence[float], constant: float | None = None
) -> Polynomial:
    """Fit ``values = a + b N + c N^2``, by least squares of the relative errors.

    Args:
        lengths: N of each value; at least 4 different ones, 3 when ``a`` is given.
        values: positive; greater than ``constant``.
        constant: ``a``, where it is known; the errors are then relative to what is above it.

    Raises:
        CannotFitError: too few lengths, or a value that is no greater than the constant.
    """
    n, y = _checked(lengths, values, unknowns=3 if constant is None else 2)
    _require_above(y, constant or 0.0)
    if constant is not None:
        y = y - constant
    scale = n.max()  # powers of N / max N: the columns stay of one size
    x = n / scale
    powers = (0, 1, 2) if constant is None else (1, 2)
    columns = np.stack([x**p / y for p in powers], axis=1)
    solution, covariance = _least_squares(columns, np.ones_like(y))
    found = {0: Estimate(constant or 0.0, 0.0, 0.0)}
    for index, p in enumerate(powers):
        unit = scale**p
        variance = covariance[index, index] / unit**2
        found[p] = _estimate(solution[index] / unit, variance, len(n) - len(powers))
    return Polynomial(found[0], found[1], found[2], len(n))


@cache
def student_t(dof: int, confidence: float = CONFIDENCE) -> float:
    """t such that Student's variable of ``dof`` degrees of freedom is within -t..t so often.

    The probability is a finite sum in the angle atan(t / sqrt(dof)) (Abramowitz and Stegun, 26.7.3
    and 26.7.4); it grows with the angle, which bisection finds.
    """
    if dof < 1:
        raise ValueError(f"dof={dof} must be at least 1")
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if _within(middle, dof) < confidence:
            low = middle
        else:
            high = middle
    return math.sqrt(dof) * math.tan(low)


def _within(angle: float, dof: int) -> float:
    """P(|T| < sqrt(dof) tan(angle)) of Student's T."""
    cos, sin = math.cos(angle), math.sin(angle)
    if dof % 2:
        term, total = cos, 0.0  # cos, 2/3 cos^3, 2/3 4/5 cos^5, ... below power dof
        for k in range(1, dof, 2):
            total += term
            term *= (k + 1) / (k + 2) * cos**2
        return 2 / math.pi * (angle + sin * total)
    term, total = 1.0, 0.0  # 1, 1/2 cos^2, 1/2 3/4 cos^4, ... below power dof
    for k in range(0, dof, 2):
        total += term
        term *= (k + 1) / (k + 2) * cos**2
    return sin * total


def _checked(lengths, values, unknowns: int) -> tuple[np.ndarray, np.ndarray]:
    n, y = np.asarray(lengths, dtype=np.float64), np.asarray(values, dtype=np.float64)
    different = len(np.unique(n))
    if different <= unknowns:
        raise CannotFitError(
            f"{different} {'length' if different == 1 else 'lengths'}; "
            f"{unknowns} unknowns and their error need at least {unknowns + 1}"
        )
    return n, y


def _require_above(y: np.ndarray, constant: float) -> None:
    if y.min() <= constant:
        raise CannotFitError(f"a value of {y.min():.4g} is not above the constant {constant:.4g}")


def _least_squares(columns: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The solution and its covariance."""
    solution = np.linalg.lstsq(columns, target, rcond=None)[0]
    return solution, _covariance(columns, target - columns @ solution)


def _covariance(columns: np.ndarray, residuals: np.ndarray) -> np.ndarray:
    points, unknowns = columns.shape
    variance = float(residuals @ residuals) / (points - unknowns)
    # (A^T A)^-1 of A = QR is R^-1 R^-T, without the squared condition of A^T A.
    inverse = np.linalg.inv(np.linalg.qr(columns, mode="r"))
    return max(variance, ROUNDING**2) * inverse @ inverse.T


def _estimate(value: float, variance: float, dof: int) -> Estimate:
    stderr = math.sqrt(variance)
    return Estimate(float(value), stderr, student_t(dof) * stderr)


def _power_columns(n: np.ndarray, y: np.ndarray, exponent: float) -> np.ndarray:
    return np.stack([1 / y, n**exponent / y], axis=1)


def _best_exponent(n: np.ndarray, y: np.ndarray) -> float:
    """The exponent whose best constant and factor leave the smallest relative errors."""

    def error(exponent: float) -> float:
        columns = _power_columns(n / n.max(), y, exponent)
        solution = np.linalg.lstsq(columns, np.ones_like(y), rcond=None)[0]
        return float(np.sum((1 - columns @ solution) ** 2))

    grid = np.linspace(0.05, 4.0, 80)
    at = int(np.argmin([error(p) for p in grid]))
    if at in (0, len(grid) - 1):
        raise CannotFitError("no exponent from 0 to 4 and constant describe these values")
    low, high = grid[at - 1], grid[at + 1]
    inside = (math.sqrt(5) - 1) / 2  # golden section
    for _ in range(40):
        left, right = high - inside * (high - low), low + inside * (high - low)
        if error(left) < error(right):
            high = right
        else:
            low = left
    return float((low + high) / 2)
