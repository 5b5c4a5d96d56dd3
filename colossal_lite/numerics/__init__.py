"""Draws random numbers, updates weights, schedules learning rates and chooses dtypes.

May import: kernels, config.  Read first: `optimizers`.
"""
