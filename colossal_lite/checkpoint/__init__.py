"""Saves and loads checkpoints on any mesh: files, manifest, slices.

May import: sharding, config, models, memory.  Read first: `checkpointer`.
"""
