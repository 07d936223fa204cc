"""Memory that PyTorch and this project's kernels take on a CUDA GPU and not on a CPU.

A step is played on fake tensors of the CPU (PyTorch cannot fake a GPU that it was not built for).
What follows makes the bytes those of a GPU.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models.offload import HostOffload

# cuBLAS keeps a workspace for each thread that calls it: forward's and backward's. On Hopper each
# has 32 MiB, on other GPUs 8.1 MiB (PyTorch's default of CUBLAS_WORKSPACE_CONFIG): the larger.
CUBLAS_WORKSPACES = 2 * 32 * 2**20


def scratch(func: Any, args: tuple) -> int:
    """Bytes that an operation's GPU kernel allocates besides its results, while it runs."""
    find = _SCRATCH.get(func)
    return find(*args) if find else 0


def _float32(t: Tensor) -> int:
    """Bytes of a float32 copy of a half-precision tensor; its own type is good enough else."""
    return 4 * t.numel() if t.element_size() < 4 else 0


def _v1_backward(do: Tensor, q: Tensor, *rest: Any) -> int:
    return _float32(q) + _v2_backward(do, q)  # dq (flash_attention/v1/backward.py)


def _v2_backward(do: Tensor, q: Tensor, *rest: Any) -> int:
    return do.nbytes + 2 * 4 * q.shape[:-1].numel()  # flash_attention/delta.py


def _flash_backward(do: Tensor, q: Tensor, *rest: Any) -> int:
    # dq in float32, and D_i with rows rounded up to 128.
    return 4 * q.numel() + 4 * q.shape[:-1].numel()


_SCRATCH = {
    # o in float32 (flash_attention/v1/forward.py)
    torch.ops.flash_attention.v1_forward.default: lambda q, *rest: _float32(q),
    torch.ops.flash_attention.v1_backward.default: _v1_backward,
    torch.ops.flash_attention.v2_backward.default: _v2_backward,
    # gradient times result, in their own type
    torch.ops.aten._softmax_backward_data.default: lambda grad, *rest: grad.nbytes,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _flash_backward,
}


class LikeCuda(TorchFunctionMode):
    """As a context: a softmax in float32 of a float16 tensor (not of a bfloat16 one) reads it as it
    is, instead of a copy in float32; and fake tensors have a value where Adam asks for one."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.item:  # Adam asks for the number of its steps
            return 1.0
        if func in _SOFTMAXES and kwargs.get("dtype") == torch.float32:
            x = args[0]
            if x.dtype == torch.float16:
                return _SOFTMAXES[func](x, kwargs["dim"], True)
        return func(*args, **kwargs)


_SOFTMAXES = {
    torch.softmax: torch._softmax,
    torch.nn.functional.log_softmax: torch._log_softmax,
}


class PlayedOffload(HostOffload):
    """Lets go of tensors, and makes them again, when HostOffload does; copies nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = _NoCopies()

    def _moves(self, tensor: Tensor) -> bool:
        return True


class _NoCopies:
    def host_buffer(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype, device="meta")

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Nothing to copy, and nothing to wait for."""

    def wait(self, copied: None) -> None:
        """The copy that there is not is done."""

    def abandon(self, tensor: Tensor) -> None:
        """Nor does it use the tensor."""
