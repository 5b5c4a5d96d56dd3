"""Text, the order of samples, batches and their checks.

May import: config, distributed, memory.  Read first: `dataloader`.
"""
