"""The statistics m and l beside o: they have no gradient, and one into them is an error.

A loss with m or l in it, such as a penalty on the log-sum-exp, would otherwise train on part of its
gradient without a word.
"""

import torch
from torch import Tensor
from torch.library import custom_op


def without_gradient(statistic: Tensor, o: Tensor, name: str) -> Tensor:
    """``statistic``, tied to o so that a gradient into it raises. name: the function users call.

    A gradient of zero passes: a compiled graph and reentrant checkpointing hand zeros back for
    every output that nothing followed. So the gradient, where one comes, is looked at: a reduction
    over ``[B, H, Nq]``, which the host waits for.
    """
    if torch.compiler.is_compiling():
        return _statistic(statistic, o, name)
    return _NoGradient.apply(statistic, o, name)


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(f"{name} has no gradient for the statistics m and l: detach them")


class _NoGradient(torch.autograd.Function):
    """For eager calls: torch.func does not see through a custom op."""

    generate_vmap_rule = True

    @staticmethod
    def forward(statistic, o, name):
        return statistic.view_as(statistic)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.name = inputs[2]

    @staticmethod
    def backward(ctx, grad):
        if torch._C._are_functorch_transforms_active():  # what it wraps cannot be looked at
            raise _refusal(ctx.name)
        _refuse_gradient(grad, ctx.name)
        return None, None, None


# For compiled graphs, which an error cannot be traced into.
@custom_op("flash_attention::statistic", mutates_args=())
def _statistic(statistic: Tensor, o: Tensor, name: str) -> Tensor:
    return statistic.clone()


# A graph that CUDA replays cannot wait for the host.
@custom_op("flash_attention::refuse_gradient", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def _refuse_gradient(grad: Tensor, name: str) -> Tensor:
    if grad.any():
        raise _refusal(name)
    return grad.new_zeros(())


@_statistic.register_fake
def _(statistic, o, name):
    return torch.empty_like(statistic)


@_refuse_gradient.register_fake
def _(grad, name):
    return grad.new_empty(())


@_statistic.register_vmap
def _(info, in_dims, statistic, o, name):
    return _statistic(statistic, o, name), in_dims[0]


@_refuse_gradient.register_vmap
def _(info, in_dims, grad, name):
    return _refuse_gradient(grad, name), None


def _save(ctx, inputs, output):
    _, o, ctx.name = inputs
    ctx.shape, ctx.dtype = o.shape, o.dtype


def _differentiate(ctx, grad):
    # A zero that o's gradient is made of: unused, the refusal would not be in the graph.
    return None, _refuse_gradient(grad, ctx.name).to(ctx.dtype).expand(ctx.shape), None


_statistic.register_autograd(_differentiate, setup_context=_save)
