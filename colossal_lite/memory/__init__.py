"""Chunks, arenas and tiers of memory, and every copy between them.

May import: kernels, sharding, schedule, config, numerics, observe, distributed.  Read first: `chunk`.
"""
