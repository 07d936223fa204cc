"""Where a call runs, and what every kernel launch needs to know about its device."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from flash_attention.tiling import Blocks, padded_head_dim

try:
    import triton
    import triton.language
    import triton.runtime.errors
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no wheel on macOS and Windows: the PyTorch tiles run there
    triton = None


def use_triton(q: Tensor) -> bool:
    """CUDA tensors take the Triton kernels; CPU tensors do under TRITON_INTERPRET=1."""
    if triton is None:
        return False
    if q.is_cuda:
        return q.dtype != torch.float64  # no float64 matrix product in Triton on a GPU
    return q.device.type == "cpu" and interpreting()


def fitting(run: Callable, blocks: Blocks, fixed: bool, device: torch.device, *kernel: object):
    """``run(blocks)``, with smaller blocks where the device's shared memory is too small for them.

    Triton finds out before the kernel starts: nothing has been written when it refuses. What fits
    is remembered for the device and for ``kernel``, whatever else decides how much is needed.

    Raises:
        ValueError: blocks that the user ``fixed``, or the smallest there are, do not fit.
    """
    key = (device, blocks, *kernel)
    tried = _FITTING.get(key, blocks)
    while True:
        try:
            result = run(tried)
        except triton.runtime.errors.OutOfResources as error:
            smaller = None if fixed else tried.smaller()
            if smaller is None:
                raise ValueError(
                    f"block_q={tried.block_q} with block_kv={tried.block_kv} needs "
                    f"{error.required} of {error.name}; {device} has {error.limit}; "
                    "give smaller blocks"
                ) from error
            tried = smaller
        else:
            _FITTING[key] = tried
            return result


_FITTING: dict[tuple, Blocks] = {}


def on_device(t: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's."""
    return torch.cuda.device(t.device) if t.is_cuda else nullcontext()


def or_dummy(t: Tensor | None, like: Tensor) -> Tensor:
    """A pointer for an argument that the kernel, by a constexpr, does not read."""
    return like if t is None else t


def descriptors_fit(*tensors: Tensor) -> bool:
    """Whether a tensor map can describe these ``[B, H, N, D]`` tensors: a Hopper GPU or later, rows
    contiguous, everything else at multiples of 16 bytes."""
    if tensors[0].is_cuda and torch.cuda.get_device_capability(tensors[0].device) < (9, 0):
        return False
    return all(
        t.stride(-1) == 1
        and t.data_ptr() % 16 == 0
        and all(s > 0 and s * t.element_size() % 16 == 0 for s in t.stride()[:-1])
        for t in tensors
    )


def descriptor(t: Tensor, rows: int, block_d: int):
    """A tensor map over ``[B, H, N, D]`` for tiles of ``rows`` rows of one head; beyond N and D a
    load gives 0 and nothing is stored."""
    return TensorDescriptor.from_tensor(t, [1, 1, rows, block_d])


def sources(use_descriptors: bool, rows: int, *tensors: Tensor) -> Iterator:
    """What a kernel loads tiles of ``rows`` rows from: tensor maps, or the tensors themselves."""
    block_d = padded_head_dim(tensors[0].shape[-1])
    return (descriptor(t, rows, block_d) if use_descriptors else t for t in tensors)


def constants(
    q: Tensor,
    blocks: Blocks,
    causal: bool,
    dropout_p: float,
    segment_ids: Tensor | None,
) -> dict[str, Any]:
    """What every attention kernel is compiled for."""
    head_dim = q.shape[-1]
    return dict(
        CAUSAL=causal,
        SEGMENTS=segment_ids is not None,
        DROPOUT=dropout_p > 0.0,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_Q=blocks.block_q,
        BLOCK_KV=blocks.block_kv,
        ACC=triton_dtype(torch.promote_types(q.dtype, torch.float32)),
        PRECISION=dot_precision(q.dtype),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
    )


def triton_dtype(dtype: torch.dtype):
    """The Triton name of an accumulation dtype."""
    return {torch.float32: triton.language.float32, torch.float64: triton.language.float64}[dtype]


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot treats float32: exactly, unless the user's torch setting allows TF32."""
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"


def allows_tf32() -> bool:
    """Whether PyTorch may round float32 products to TF32. What was set through the older names,
    allow_tf32 and set_float32_matmul_precision, shows here too; those cannot be read where this
    one says otherwise than they do."""
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def rounded(result: Tensor, like: Tensor, factor: float = 1.0) -> Tensor:
    """factor * result in the dtype of ``like`` and in the layout of :func:`seq_major`; result, laid
    out so, is used up."""
    if result.dtype == like.dtype:
        return result if factor == 1.0 else result.mul_(factor)
    return torch.mul(result, factor, out=seq_major(like, like.dtype))


def seq_major(like: Tensor, dtype: torch.dtype, fill: float | None = None) -> Tensor:
    """A new ``[B, H, N, D]`` tensor laid out as [B, N, H, D], so that a transformer's
    ``o.transpose(1, 2).reshape(B, N, H * D)`` is a view. Uninitialised unless ``fill`` is given."""
    _, heads, n, head_dim = like.shape
    strides = (n * heads * head_dim, head_dim, heads * head_dim, 1)
    t = torch.empty_strided(like.shape, strides, dtype=dtype, device=like.device)
    return t if fill is None else t.fill_(fill)
