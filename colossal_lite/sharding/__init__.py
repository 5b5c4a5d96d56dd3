"""Maps ranks to mesh coordinates and to the parts of tensors that they hold; integers only.

May import: nothing of ours.  Read first: `mesh_layout`.
"""
