"""Orders samples, loads batches and checks them.

May import: memory.  Read first: `dataloader`.
"""
