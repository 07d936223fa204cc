"""Keeps the inputs of checkpointed blocks in host memory between forward and backward."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks


class HostOffload:
    """Moves what is saved inside ``saving()`` to pinned host memory, and back for backward.

    The copies run on a stream of their own beside the computation. Forward: while block i
    computes, its input is copied out; the computation waits for that copy before block i + 1
    starts, so that two inputs at most are on the GPU. Backward: while block i computes, the
    input of block i - 1 is copied in.

    The host buffers, one a block, are kept and used again by the next step: to pin memory takes
    long. PyTorch's own cache of it would not do: there a buffer is free only when the GPU is done
    with it, and the host runs ahead of the GPU. (PyTorch makes each a power of two bytes large.)

    Tensors on a CPU stay where they are.
    """

    def __init__(self) -> None:
        self.copies: _Copies | None = None  # made when the first tensor on a GPU comes
        self._free: list[Tensor] = []  # host buffers that hold nothing
        self._latest: _Saved | None = None  # what this forward pass saved last

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around the forward pass: takes over whatever autograd saves directly under it."""
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._latest = None

    def _pack(self, tensor: Tensor) -> "Tensor | _Saved":
        if not self._moves(tensor):
            return tensor
        if self._latest is not None:
            self._latest.leave_device()
        self._latest = _Saved(self, tensor, self._borrow(tensor), self._latest)
        return self._latest

    def _unpack(self, packed: "Tensor | _Saved") -> Tensor:
        return packed.take() if isinstance(packed, _Saved) else packed

    def _moves(self, tensor: Tensor) -> bool:
        # Fake tensors: a count of bytes (training/memory.py), which has nothing to copy.
        if not tensor.is_cuda or isinstance(tensor, FakeTensor):
            return False
        self.copies = self.copies or _Copies(tensor.device)
        return True

    def _borrow(self, like: Tensor) -> Tensor:
        """A host buffer of this shape and dtype."""
        for i, buffer in enumerate(self._free):
            if buffer.shape == like.shape and buffer.dtype == like.dtype:
                return self._free.pop(i)
        self._free.clear()  # those of another shape
        return self.copies.host_buffer(like)

    def give_back(self, buffer: Tensor) -> None:
        # Copies out of it may still be waiting; those into it will wait behind them on one stream.
        self._free.append(buffer)


class _Saved:
    """A tensor on its way to the host and back."""

    def __init__(
        self, offload: HostOffload, tensor: Tensor, host: Tensor, previous: "_Saved | None"
    ) -> None:
        self.offload = offload
        self.previous = previous  # what was saved before it, and is needed after it
        self.device = tensor.device
        self.host = host
        self.tensor: Tensor | None = tensor  # while it is on the device
        self.copied = offload.copies.copy(self.host, tensor)

    def leave_device(self) -> None:
        """Let go of the device's memory; what is computed next waits for the copy."""
        self.offload.copies.wait(self.copied)
        self.tensor = None

    def come_back(self) -> None:
        """Start the copy to the device."""
        if self.tensor is None:
            # Allocated for the stream that computes: it is freed there, too.
            self.tensor = torch.empty_like(self.host, device=self.device)
            self.copied = self.offload.copies.copy(self.tensor, self.host)

    def take(self) -> Tensor:
        """The tensor, on the device; starts the copy of the one needed next."""
        self.come_back()
        self.offload.copies.wait(self.copied)
        tensor, self.tensor = self.tensor, None
        if self.previous is not None:
            self.previous.come_back()
        return tensor

    def __del__(self) -> None:
        if self.tensor is not None:  # a backward pass that was broken off, or never came
            self.offload.copies.abandon(self.tensor)
        self.offload.give_back(self.host)


class _Copies:
    """Copies between a GPU and the host, in order, on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> torch.cuda.Event:
        """Copy as soon as the current stream has come this far; the event is then reached."""
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: torch.cuda.Event) -> None:
        """Hold the current stream, not the host, until the event is reached."""
        torch.cuda.current_stream(self.stream.device).wait_event(event)

    def abandon(self, tensor: Tensor) -> None:
        """Have the allocator wait for this stream before it uses the tensor's memory again."""
        tensor.record_stream(self.stream)
