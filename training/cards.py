"""GPUs by name, and how much of their memory tensors can take."""

from training.errors import ConfigError
from training.units import GIB

# What torch.cuda.get_device_properties says, in GiB; a little below what is printed on the box.
CARDS = {
    "t4": 14.6,
    "a10g": 22.0,
    "l4": 22.0,
    "rtx4090": 23.5,
    "v100_32": 31.7,
    "a100_40": 39.4,
    "l40s": 44.4,
    "a100_80": 79.2,
    "h100": 79.1,
    "h200": 139.8,
}
CONTEXT = 0.6  # GiB that the CUDA context and the kernels' code take


def card_bytes(card: str) -> int:
    """Bytes for tensors on a card: one of ``CARDS``, or a number of GiB that all are for tensors.

    Raises:
        ConfigError: it is neither.
    """
    if card in CARDS:
        return int((CARDS[card] - CONTEXT) * GIB)
    try:
        gib = float(card)
    except ValueError:
        gib = 0.0
    if not 0 < gib < float("inf"):
        raise ConfigError(
            f"--card={card} is not accepted; give one of {', '.join(CARDS)}, or a number of GiB"
        )
    return int(gib * GIB)
