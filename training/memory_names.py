"""The parts of a training step's memory, by their key in summary.json, with their names in a plot.

Apart from what counts them, which needs PyTorch: a report does not.
"""

PARTS = {
    "parameters": "parameters",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "attention": "saved by attention",
    "mlp": "saved by the MLPs",
    "logits_and_loss": "saved by logits and loss",
    "rest": "saved by the rest",
}
