"""Units of what is measured."""

GIB = 2**30  # bytes
