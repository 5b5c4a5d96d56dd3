"""Tensor and sequence parallel modes, the swap of layers, and the loss over sharded logits.

May import: kernels, sharding, config, models, numerics, transforms, distributed, memory, data.  Read first:
`parallelize`.
A new tensor mode is a file here and a line in `TENSOR_MODES`.
"""
