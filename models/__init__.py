"""The GPT, its attention layer, loss and optimizer, and the LightningModule that trains it."""
