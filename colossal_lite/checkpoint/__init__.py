"""Files, manifest, save and load on any mesh.

May import: sharding, config, models, memory.  Read first: `checkpointer`.
"""
