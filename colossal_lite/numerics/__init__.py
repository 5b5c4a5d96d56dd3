"""Random numbers, optimizer rules, learning rates and dtypes.

May import: kernels, config.  Read first: `optimizers`.
"""
