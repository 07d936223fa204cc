"""Text to batches.

A corpus is a list of documents; a tokeniser turns each into numbers; `prepare` writes them once
into flat files in the token cache, an end-of-text token after each document; `packing` cuts the
flat files into sequences; `sampler` orders the sequences; `module` hands batches to the trainer.
"""
