"""Memory of a run: bytes saved for backward, peaks, and telling out-of-memory from other faults.

Three different numbers are easily confused, so each has its own name here:

* saved: what autograd keeps for backward at one time; exact, and the same on any device,
* allocated: the most bytes of live tensors at one time on a GPU,
* reserved: the most bytes PyTorch's allocator held on that GPU; this decides a real out-of-memory.

On a CPU the peak resident set of the process takes the place of the last two.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from flash_attention.base import Attention
from models.gpt import GPT, MLP
from models.loss import ChunkedLoss, FullLoss
from training.units import GIB

# What saves for backward: a kind of module, or what happens outside of the model (the loss). The
# GPT's own operations are the vocabulary head's. All that lies inside belongs to the innermost of
# these, except that a block's own norms, residuals and projections are the rest.
KINDS = {Attention: "attention", MLP: "mlp", GPT: "logits_and_loss"}
OUTSIDE = "logits_and_loss"
REST = "rest"
SAVED_PARTS = ("attention", "mlp", "logits_and_loss", "rest")


@dataclass(frozen=True)
class SavedBytes:
    """Bytes kept for the backward pass: inside the attention modules, and in the whole model.

    ``parts``: the total by ``SAVED_PARTS``; each storage in one of them.
    """

    attention: int
    total: int
    parts: dict[str, int] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, n_bytes: dict[int, int], part: dict[int, str]) -> "SavedBytes":
        """The sums of storages whose bytes and parts are given by the same keys."""
        parts = dict.fromkeys(SAVED_PARTS, 0)
        for key, size in n_bytes.items():
            parts[part[key]] += size
        return cls(parts["attention"], sum(n_bytes.values()), parts)


def saved_for_backward(
    model: nn.Module,
    tokens: Tensor,
    *,
    loss_fn: FullLoss | ChunkedLoss | None = None,
    precision: AbstractContextManager | None = None,
    fake: bool = True,
) -> SavedBytes:
    """Bytes that forward and loss of one micro-batch keep for backward.

    With ``model.activation_checkpointing="block"`` these are the blocks' inputs (those that
    ``model.offload_checkpoints`` moves to the host left out) and what one block, run again in
    backward, keeps at a time.

    Nothing is computed or allocated: tensors are replaced by fake ones, which have a shape, a dtype
    and a device but no data. Parameters, gradients, random states and the mode (training or not)
    stay as they are.

    Every storage counts once and whole, however many views of it are saved. Parameters and buffers
    do not count: they are there anyway. The half-precision copies autocast makes of parameters do:
    they live until backward. A compiled model is counted as if it were not compiled.

    Args:
        model: token ids ``[B, N]`` -> logits ``[B, N, V]``; what its ``Attention`` modules save is
            the attention part.
        tokens: int64 ``[B, N + 1]``, on the model's device; the values do not matter.
        loss_fn: the loss of the run; None: that over all logits at once.
        precision: context to run in, such as ``torch.autocast(...)``.
        fake: False computes for real, at the real cost (for tests).
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext()
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if fake:
        state = {name: mode.from_tensor(tensor) for name, tensor in state.items()}
        tokens = mode.from_tensor(tokens)

    owned = {_storage_key(tensor) for tensor in state.values()}
    ledger = _Ledger(owned)
    # Of what runs again in backward, the ledger's hooks see nothing but the inputs.
    run_again = model.blocks if getattr(model, "activation_checkpointing", "none") != "none" else []
    again = [_Ledger(owned) for _ in run_again]
    step = _Loss(model, loss_fn or FullLoss())
    state = {f"model.{name}": tensor for name, tensor in state.items()}
    devices = [tokens.device] if tokens.is_cuda else []
    with (
        torch.random.fork_rng(devices),
        torch.compiler.set_stance("force_eager"),
        torch.enable_grad(),
        mode,
        precision or nullcontext(),
        ledger.watching(model),
        ExitStack() as stack,
        saved_tensors_hooks(ledger.pack, lambda tensor: tensor),
    ):
        for block_ledger, block in zip(again, run_again, strict=True):
            stack.enter_context(block_ledger.watching(block))
            stack.enter_context(block_ledger.packing_inside(block))
        functional_call(step, state, (tokens,))
    saved = (ledger.saved_with(block_ledger) for block_ledger in again or [ledger])
    return max(saved, key=lambda count: count.total)


class _Loss(nn.Module):
    """A training step as one module, so that functional_call can replace its parameters."""

    def __init__(self, model: nn.Module, loss_fn: FullLoss | ChunkedLoss) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, tokens: Tensor) -> Tensor:
        return self.loss_fn(self.model, tokens)


class _Ledger:
    """Storages saved so far, with their bytes and the part of the model that saved them.

    What attention saves is its own, whoever saved it before; else the first to save it counts.
    """

    def __init__(self, owned: set[int]) -> None:
        self.owned = owned
        self.total: dict[int, int] = {}
        self.part: dict[int, str] = {}
        self._kept: list[Tensor] = []  # a freed storage's address could come back as another's
        self._inside = [OUTSIDE]  # of the modules that are running, the outermost first

    def pack(self, tensor: Tensor) -> Tensor:
        key = _storage_key(tensor)
        if key not in self.owned:
            self._kept.append(tensor)
            self.total[key] = tensor.untyped_storage().nbytes()
            if self._inside[-1] == "attention" or key not in self.part:
                self.part[key] = self._inside[-1]
        return tensor

    def saved_with(self, other: "_Ledger") -> SavedBytes:
        """What is in this ledger, in the other or in both."""
        return SavedBytes.of(self.total | other.total, self.part | other.part)

    @contextmanager
    def packing_inside(self, module: nn.Module) -> Iterator[None]:
        """Note, while the context lasts, what ``module`` saves, instead of any hooks around it."""
        hooks = saved_tensors_hooks(self.pack, lambda tensor: tensor)
        handles = [
            module.register_forward_pre_hook(lambda *_: hooks.__enter__()),
            module.register_forward_hook(lambda *_: hooks.__exit__(), always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Note, while the context lasts, which part of the model runs."""

        def enter(module: nn.Module, *_):
            self._inside.append(part_of(module, inside=self._inside[-1]))

        def leave(*_):
            self._inside.pop()

        with during_forward(model, enter, leave):
            yield


@contextmanager
def during_forward(
    model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]
) -> Iterator[None]:
    """While the context lasts, call ``enter(module, ...)`` before the forward of each module of the
    model and ``leave(module, ...)`` after it, also when it raises."""
    handles = []
    for module in model.modules():
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def part_of(module: nn.Module, inside: str) -> str:
    """The part that a module belongs to when it runs inside of another part's module."""
    for kind, part in KINDS.items():
        if isinstance(module, kind):
            return part
    return inside if inside in ("attention", "mlp") else REST


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def check_fits_in_ram(saved: SavedBytes, n_tokens: int) -> None:
    """Refuse a micro-batch whose saved tensors alone exceed the free RAM, before it is tried.

    The kernel of the operating system would otherwise kill the process (or stall the machine).

    Raises:
        MemoryError: with both numbers.
    """
    available = psutil.virtual_memory().available
    if saved.total > available:
        raise MemoryError(
            f"a micro-batch of {n_tokens} tokens keeps {saved.total / GIB:.1f} GiB for backward "
            f"({saved.attention / GIB:.1f} GiB of it for attention), and {available / GIB:.1f} GiB "
            "of RAM are free; lower seq_len or micro_batch_tokens, or give attention=flash_v1, "
            "loss=chunked or model.activation_checkpointing=block"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` says that memory ran out, on a GPU or in RAM.

    Not for an illegal memory access (a fault), nor for a Triton kernel that needs more on-chip
    memory than the GPU has (a matter of block sizes, whatever the batch).
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    message = str(error)
    return isinstance(error, RuntimeError) and (
        "CUBLAS_STATUS_ALLOC_FAILED" in message
        or "CUDA error: out of memory" in message
        or "Triton Error [CUDA]: out of memory" in message
        or ("DefaultCPUAllocator" in message and "can't allocate memory" in message)
    )


def reset_peaks(device: torch.device) -> None:
    """Start the peaks anew: the highest values from here on are what ``peaks`` returns.

    What waits to be freed goes first, or it would count, or go in between: the call that compiles
    a Triton kernel leaves its tensors to the garbage collector, and PyTorch's thread that ran a
    backward on the GPU may still hold its gradients when that has returned.
    """
    gc.collect()
    if device.type == "cuda":
        _wait_for_backward(device)
        torch.cuda.reset_peak_memory_stats(device)
    elif sys.platform == "linux":
        # Where a container forbids it, the peak stays that of the whole process.
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS


def _wait_for_backward(device: torch.device) -> None:
    """Run another, of no bytes: the thread lets go of one before it takes up the next."""
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(x * 1, x, x.detach())


def current(device: torch.device) -> int:
    """Bytes now: of live tensors on a GPU, else of the process's resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return psutil.Process().memory_info().rss


def peaks(device: torch.device) -> dict[str, int]:
    """Peak bytes since the last reset: ``allocated`` and ``reserved`` of a GPU, else ``rss``."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"rss": _peak_rss()}


def _peak_rss() -> int:
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024  # "kB" means KiB there
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
