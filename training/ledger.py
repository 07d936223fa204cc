"""Counts the bytes of live tensors while code runs: what, of which part, and the most at once."""

import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.memory import OUTSIDE, during_forward, part_of

KEEP_INPUTS = ("attention", "mlp")  # parts that keep, for backward, what they are given
ROUNDING = 512  # bytes: PyTorch's allocator on a GPU rounds every allocation up to these


class Ledger(TorchDispatchMode):
    """As a context: counts every storage from the operation that makes it to its last reference.

    Each belongs to the part of the model that ran when it was made, or to the one that it was moved
    to: what attention and the MLPs are given is theirs, as they keep it for backward (q, k and v).
    What backward makes belongs to the part whose forward it differentiates.

    Args:
        device_type: storages elsewhere do not count.
        scratch: bytes that an operation needs besides its results, only while it runs; called with
            the operation and its arguments.

    Attributes:
        live: bytes by part, now.
        peak: the same, when their sum was highest.
    """

    def __init__(self, device_type: str, scratch: Callable[..., int]) -> None:
        super().__init__()
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._peak_total = 0
        self._device_type = device_type
        self._scratch = scratch
        self._owned: dict[int, tuple[str, int]] = {}  # storage -> its part and bytes
        self._inside = [OUTSIDE]  # of the modules that are running, the outermost first
        # The parts that ran, by the sequence number that autograd gives its next operation.
        self._numbers: list[int] = [0]
        self._parts: list[str] = [OUTSIDE]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if _adds_gradients(func, args):
            out = args[0].add_(args[1])
        else:
            out = func(*args, **(kwargs or {}))
        part = self._running()
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.note(t, part)
        self._mark(part, self._scratch(func, args))
        return out

    def note(self, t: Tensor, part: str) -> None:
        """Count a tensor's storage as ``part``, unless it counts already."""
        storage = t.untyped_storage()
        key = storage._cdata
        if t.device.type != self._device_type or key in self._owned:
            return
        n_bytes = -(-storage.nbytes() // ROUNDING) * ROUNDING
        self._owned[key] = part, n_bytes
        self.live[part] += n_bytes
        weakref.finalize(storage, self._forget, key)

    def move(self, t: Tensor, part: str) -> None:
        """From now on the tensor's storage, which is counted, belongs to another part."""
        key = t.untyped_storage()._cdata
        old, n_bytes = self._owned[key]
        self._owned[key] = part, n_bytes
        self.live[old] -= n_bytes
        self.live[part] += n_bytes

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note, while the context lasts, which part of the model runs."""

        def enter(module: nn.Module, inputs: tuple):
            part = part_of(module, inside=self._inside[-1])
            if part in KEEP_INPUTS and part != self._inside[-1]:
                self._hand_over(inputs, part)
            self._inside.append(part)
            self._turn()

        def leave(*_):
            self._inside.pop()
            self._turn()

        with during_forward(model, enter, leave):
            yield

    def _hand_over(self, inputs: tuple, part: str) -> None:
        for t in inputs:
            if isinstance(t, Tensor) and t.untyped_storage()._cdata in self._owned:
                self.move(t, part)

    def _turn(self) -> None:
        self._numbers.append(torch._C._autograd._get_sequence_nr())
        self._parts.append(self._inside[-1])

    def _running(self) -> str:
        node = torch._C._current_autograd_node()
        if node is None or torch.is_grad_enabled():  # forward, also when backward runs it again
            return self._inside[-1]
        return self._parts[bisect_right(self._numbers, node._sequence_nr()) - 1]

    def _forget(self, key: int) -> None:
        part, n_bytes = self._owned.pop(key)
        self.live[part] -= n_bytes

    def _mark(self, part: str, scratch: int) -> None:
        total = self.live.total() + scratch
        if total > self._peak_total:
            self._peak_total = total
            self.peak = self.live.copy()
            self.peak[part] += scratch


def _adds_gradients(func: Any, args: tuple) -> bool:
    """Whether the autograd engine sums two gradients of one tensor.

    It does so within the first of them, but not while a mode like this one is active. Sums of
    forward, which a checkpoint runs again in backward, have gradients enabled.
    """
    return (
        func is torch.ops.aten.add.Tensor
        and torch._C._current_autograd_node() is not None
        and not torch.is_grad_enabled()
        and isinstance(args[1], Tensor)
        and (args[0].shape, args[0].dtype) == (args[1].shape, args[1].dtype)
    )
