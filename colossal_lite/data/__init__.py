"""Orders samples, loads batches and checks them.

May import: numerics, observe, memory.  Read first: `dataloader`.
"""
