"""Units of what is measured."""

GIB = 2**30  # bytes


def in_gib(n_bytes: float) -> str:
    """Three digits that mean something, for toy models and for large ones."""
    return f"{n_bytes / GIB:,.3f}" if n_bytes >= GIB else f"{n_bytes / GIB:.3g}"
