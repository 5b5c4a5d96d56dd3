"""Makes a rank's part of a model: finds its plan, proves it on a small copy, and gives its loss.

May import: kernels, sharding, config, models, numerics, transforms, observe, distributed, memory, data, layers.  Read
first: `parallelize`.
"""
