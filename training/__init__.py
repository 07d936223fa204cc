"""What prepares, watches and reports a run. Imports models, data and flash_attention only."""
