"""Where a rank stands in the mesh, and which part of a tensor it holds; integers only.

May import: nothing of ours.  Read first: `mesh_layout`.
"""
