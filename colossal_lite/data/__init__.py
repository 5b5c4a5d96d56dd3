"""Orders samples, loads batches and checks them.

May import: numerics, memory.  Read first: `dataloader`.
"""
