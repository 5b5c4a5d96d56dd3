"""Layers of the tensor and sequence parallel modes, and the swap of a model's layers by them.

May import: kernels, sharding, config, models, numerics, transforms, observe, distributed, data.  Read first:
`tensor_1d`.
A new tensor mode is a file here and a line in `TENSOR_MODES`.
"""
