"""Plans the memory and traffic of a run without running it.

May import: kernels, sharding, schedule, config, models, numerics, transforms, observe, distributed, memory,
data, layers, parallel, offload, zero, pipeline.  Read first: `planner`.
"""
