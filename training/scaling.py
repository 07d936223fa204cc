"""How the memory of a sweep's runs grows with sequence length: fits of their rows, in words."""

from dataclasses import dataclass, replace

from training.fits import (
    CannotFitError,
    Estimate,
    Polynomial,
    PowerLaw,
    last_exponent,
    polynomial,
    power_law,
)

SAVED, PEAK = "saved for backward by attention", "peak memory"
NO_EXPONENT = 1.0  # an interval so wide tells N from neither 1 nor N^2


@dataclass(frozen=True)
class Scaling:
    """Fits of one series of runs, or the ``problem`` that forbids them.

    ``quantity``: SAVED or PEAK. Both are per sequence; of PEAK the constant part (parameters,
    gradients, optimizer) is subtracted: as measured before forward, or else fitted. ``last`` is the
    exponent between the two longest lengths, where lower terms count least.
    """

    quantity: str
    constant: str  # what is subtracted, in words
    power: PowerLaw | None = None
    polynomial: Polynomial | None = None
    problem: str | None = None
    last: float | None = None

    def legend(self) -> str:
        if self.power is None:
            return "not fitted"
        exponent = self.power.exponent
        fitted = f"N^{exponent.value:.2f} ± {max(exponent.half_width, 0.01):.2f}"
        return f"{fitted} (last two: {self.last:.2f})"

    def note(self, series: str) -> str:
        """A sentence for the notes below a table."""
        if self.power is None:
            return f"{self.quantity} of {series}: not fitted ({self.problem})"
        e = self.power.exponent
        text = (
            f"{self.quantity} of {series}{self.constant}: N^{e.value:.3f} "
            f"(95% interval {e.low:.3f} to {e.high:.3f}, {self.power.points} runs), "
            f"N^{self.last:.3f} between the two longest"
        )
        if self.polynomial is None:
            return f"{text}; no polynomial fitted ({self.problem})"
        c = self.polynomial.c
        form = "b N + c N²" if self.polynomial.a.stderr == 0 else "a + b N + c N²"
        return f"{text}; in {form}, c = {_bytes(c)} bytes: {verdict(c)}"


def verdict(c: Estimate) -> str:
    """Whether an estimate is told from 0 by its interval."""
    if c.low > 0:
        return "greater than 0"
    if c.high < 0:
        return "less than 0, so this is no such polynomial"
    return "0 within error"


def _bytes(e: Estimate) -> str:
    return f"{e.value:.3g} ± {e.half_width:.2g}"


def scaling_of_saved(runs: list[dict]) -> Scaling:
    """Of what attention saves: exact, so that runs out of memory count too. No constant."""
    key = "saved_attention_bytes_per_sequence"
    known = [row for row in runs if row.get(key)]
    return _fit(SAVED, "", [row["seq_len"] for row in known], [row[key] for row in known], 0.0)


def scaling_of_peak(runs: list[dict]) -> Scaling:
    """Of the peaks of runs that ended ok."""
    known = [row for row in runs if row["status"] == "ok" and row.get("peak_bytes")]
    lengths = [row["seq_len"] for row in known]
    batches = [row.get("micro_batch_size") or 1 for row in known]
    before = [row.get("memory_before_forward_bytes") for row in known]
    if all(before):
        values = [
            (row["peak_bytes"] - constant) / batch
            for row, constant, batch in zip(known, before, batches, strict=True)
        ]
        return _fit(PEAK, " less what there was before forward", lengths, values, 0.0)
    if len(set(batches)) > 1:
        problem = "micro-batches differ, and the memory before forward was not measured"
        return Scaling(PEAK, "", problem=problem)
    values = [row["peak_bytes"] for row in known]
    return _fit(PEAK, " less a fitted constant", lengths, values, None)


def _fit(quantity: str, constant: str, lengths, values, known: float | None) -> Scaling:
    try:
        power = power_law(lengths, values, known)
    except CannotFitError as error:
        return Scaling(quantity, constant, problem=str(error))
    exponent = power.exponent
    if exponent.half_width > NO_EXPONENT:
        scatter = f"N^{exponent.value:.1f} ± {exponent.half_width:.1f} says nothing"
        return Scaling(quantity, constant, problem=f"the values scatter: {scatter}")
    found = Scaling(quantity, constant, power, last=last_exponent(lengths, values, power.constant))
    try:
        return replace(found, polynomial=polynomial(lengths, values, known))
    except CannotFitError as error:
        return replace(found, problem=str(error))
