"""Trains many tasks on few devices: jobs, policies, timetables, and the trainer that follows them.

May import: config, numerics, observe, memory, checkpoint, planner, engine.  Read first: `trainer`.
`timetable` is the pure part: a new policy is one function and one line in `POLICIES`.
"""
