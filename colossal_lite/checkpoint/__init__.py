"""Files, manifest, save and load on any mesh.

May import: sharding, models, memory.  Read first: `checkpointer`.
"""
