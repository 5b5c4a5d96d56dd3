"""Chunks, arenas and tiers of memory, and every copy between them.

May import: kernels, sharding, schedule, numerics, distributed.  Read first: `chunk`.
"""
