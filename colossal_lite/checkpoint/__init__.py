"""Files, manifest, save and load on any mesh.

May import: sharding, config, models, distributed, memory.  Read first: `checkpointer`.
"""
