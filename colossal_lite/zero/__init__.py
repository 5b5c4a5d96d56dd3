"""Accumulates gradients in chunks, gathers weights, and runs the sharded optimizer.

May import: kernels, sharding, schedule, config, models, numerics, transforms, observe, distributed, memory, offload.
Read first: `gradient_hooks`.
"""
