"""Units of a model, stages, partition, and the runtime that executes a rank's list of actions.

May import: kernels, sharding, schedule, config, models, numerics, transforms, observe, distributed, memory, data,
layers, parallel, zero.  Read first: `runtime`.
"""
