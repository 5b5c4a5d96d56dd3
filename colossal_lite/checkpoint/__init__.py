"""Saves and loads checkpoints on any mesh: files, manifest, slices.

May import: sharding, config, models, observe, distributed, memory.  Read first: `checkpointer`.
"""
