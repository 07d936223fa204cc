"""Counts the memory of what runs under it, on any device and for fake tensors too."""

import weakref

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operations under this mode make.

    Attributes:
        live: of those that exist now.
        peak: the most that ever existed at one time.
        largest: of the largest one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = self.largest = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = [t.untyped_storage()._cdata for t in _tensors((args, kwargs))]
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in given:
                self._add(storage)
        return out

    def _add(self, storage) -> None:
        key, n_bytes = storage._cdata, storage.nbytes()

        def gone(_):
            del self._known[key]
            self.live -= n_bytes

        self._known[key] = weakref.ref(storage, gone)
        self.live += n_bytes
        self.peak = max(self.peak, self.live)
        self.largest = max(self.largest, n_bytes)


def _tensors(tree) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
