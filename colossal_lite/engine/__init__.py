"""`initialize`, the training step, and the context of a run.

May import: sharding, schedule, config, models, numerics, transforms, observe, distributed, memory, data,
checkpoint, parallel, zero, pipeline, planner.  Read first: `engine`.
"""
