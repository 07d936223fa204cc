"""A custom op under torch.func: vmap, grad, vjp and what is built from them.

PyTorch gives a custom op an autograd of its own, which torch.func refuses to pass through, and a
vmap that runs one slice after the other. Here an op becomes an autograd.Function, which torch.func
does see through, and vmap folds its dimension into the batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor

NO_FORWARD_MODE = "{} has no forward-mode derivative; use naive_attention for it"


def composable(name: str, op: Callable, setup_context: Callable, backward: Callable) -> Callable:
    """``op``, as an autograd.Function where torch.func is at work.

    setup_context and backward are those that ``op.register_autograd`` was given; name is the
    function that users call.
    """

    class Composable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args):
            return op(*args)

        @staticmethod
        def jvp(ctx, *tangents):
            raise RuntimeError(NO_FORWARD_MODE.format(name))

    Composable.setup_context = staticmethod(setup_context)
    Composable.backward = staticmethod(backward)

    def call(*args):
        if torch._C._are_functorch_transforms_active():
            return _eagerly(name, Composable, args)
        return op(*args)

    return call


def _eagerly(name: str, function: type[torch.autograd.Function], args: tuple) -> tuple[Tensor, ...]:
    """torch.compile would trace torch.func down to the op and not see the Function."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=f"{name} under torch.func runs in eager mode only")
    # disable() here and not on import: it brings in the compiler, which takes seconds.
    return torch.compiler.disable(function.apply)(*args)


def fold_into_batch(op: Callable, seed_at: int) -> Callable:
    """The vmap rule of an op whose tensors start with the batch, all but the dropout seed.

    seed_at: position of the seed among the arguments. With dropout the slices run one by one: an
    entry's fate hangs on its place in the batch, and a slice has its own seed
    (randomness="different") or the common one ("same").
    """

    def rule(info, in_dims, *args):
        slices = range(info.batch_size)
        moved = [t if d is None else t.movedim(d, 0) for t, d in zip(args, in_dims, strict=True)]
        if args[seed_at] is None or not slices:
            folded = [_fold(t, d, len(slices)) for t, d in zip(moved, in_dims, strict=True)]
            batch = moved[0].shape[0 if in_dims[0] is None else 1]
            outputs = [o.unflatten(0, (len(slices), batch)) for o in op(*folded)]
        else:
            each = [
                op(*(t if d is None else t[i] for t, d in zip(moved, in_dims, strict=True)))
                for i in slices
            ]
            outputs = [torch.stack(parts) for parts in zip(*each, strict=True)]
        return tuple(outputs), (0,) * len(outputs)

    return rule


def _fold(arg: object, dim: int | None, size: int) -> object:
    """A tensor ``[V, B, ...]``, or ``[B, ...]`` where dim is None, as ``[V * B, ...]``."""
    if not isinstance(arg, Tensor):
        return arg
    return (arg.expand(size, *arg.shape) if dim is None else arg).flatten(0, 1)
