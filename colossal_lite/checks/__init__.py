"""Refuses what ranks would train otherwise than one process: models, hooks, batches, losses, and reads of data.

May import: sharding, config, numerics, transforms, observe, distributed, memory, data, layers.  Read first:
`rank_comparison`.
"""
