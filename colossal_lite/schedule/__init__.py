"""A training step as a list of actions: the language, checker, simulator and all generators; no torch.

May import: nothing of ours.  Read first: `plan`.
A new schedule is one function and one line in `SCHEDULES`.
"""
