"""What forward and backward do with memory, watched from inside the custom op."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flash_attention import launch
from flash_attention.v1 import tiled as v1_tiled
from flash_attention.v2 import tiled as v2_tiled

# What allocates within the custom ops.
STEPS = [(tiled, step) for tiled in (v1_tiled, v2_tiled) for step in ("forward", "backward")]
if launch.triton is not None:
    from flash_attention.v1 import backward as v1_backward
    from flash_attention.v1 import forward as v1_forward
    from flash_attention.v2 import backward as v2_backward
    from flash_attention.v2 import forward as v2_forward
    from flash_attention.v2 import op as v2_op

    STEPS += [(v1_forward, "forward"), (v1_backward, "backward"), (v2_forward, "forward")]
    STEPS += [(v2_op, "delta"), (v2_backward, "dk_dv"), (v2_backward, "dq")]

MARGIN = 2**15  # elements before and after: more than one tile of a test reaches
UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
INITIALISED = ("zeros", "zeros_like", "new_zeros", "ones", "full", "full_like", "new_full")


def enter_inside(mode: TorchDispatchMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ``mode`` on in each execution's forward and backward: one around the call would see the
    custom op and not what is in it."""

    def with_mode(run):
        def inside(*args, **kwargs):
            with mode:
                return run(*args, **kwargs)

        return inside

    for module, step in STEPS:
        monkeypatch.setattr(module, step, with_mode(getattr(module, step)))


class Guard(TorchDispatchMode):
    """A new floating-point tensor lies between two margins of NaN, and is NaN itself where it would
    be uninitialised."""

    def __init__(self):
        super().__init__()
        self.given: list[Tensor] = []  # with their margins

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        t = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in UNINITIALISED + INITIALISED or not t.is_floating_point() or t.numel() == 0:
            return t
        size = t.untyped_storage().nbytes() // t.element_size() + 2 * MARGIN
        whole = torch.full((size,), float("nan"), dtype=t.dtype, device=t.device)
        self.given.append(whole)
        inner = whole.as_strided(t.shape, t.stride(), MARGIN)
        return inner if name in UNINITIALISED else inner.copy_(t)

    def margins_are_untouched(self) -> bool:
        return all(end.isnan().all() for t in self.given for end in (t[:MARGIN], t[-MARGIN:]))


class Largest(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.bytes = max(self.bytes, t.untyped_storage().nbytes())
        return out
