"""What the memory of a training step is made of, counted rather than measured."""

import torch
from torch import Tensor, nn

from training.memory import SAVED_PARTS, SavedBytes


def memory_parts(
    model: nn.Module, optimizer: torch.optim.Optimizer, saved: SavedBytes
) -> dict[str, int]:
    """Bytes of each of ``memory_names.PARTS``; the same on any device.

    * parameters: and buffers, such as rotary tables,
    * gradients: one for each parameter that is trained, in its dtype,
    * optimizer: its state; before the first step, what Adam's will be,
    * attention, mlp, logits_and_loss, rest: what they keep for the backward pass of a micro-batch.

    Their sum is no peak: temporaries are not in it, and backward frees as it goes.
    """
    parameters = list(model.parameters())
    trained = [p for p in parameters if p.requires_grad]
    return {
        "parameters": _bytes([*parameters, *model.buffers()]),
        "gradients": _bytes(trained),
        "optimizer": _optimizer_bytes(optimizer),
        **{part: saved.parts.get(part, 0) for part in SAVED_PARTS},
    }


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    state = [
        value
        for of_parameter in optimizer.state.values()
        for value in of_parameter.values()
        if isinstance(value, Tensor)
    ]
    if state or not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        return _bytes(state)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    count = torch.float32.itemsize  # of its steps, for each parameter
    return 2 * _bytes(trained) + count * len(trained)  # two moments in the parameter's dtype


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
