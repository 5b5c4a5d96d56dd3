"""Builds an engine from a model, runs its training steps, and holds the context of a run.

May import: sharding, schedule, config, models, numerics, transforms, observe, distributed, memory, data,
checkpoint, layers, checks, parallel, zero, pipeline, planner.  Read first: `engine`.
"""
