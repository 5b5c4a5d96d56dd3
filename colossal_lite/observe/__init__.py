"""What a run shows: memory meters, shape rules, timelines and the log of steps.

May import: schedule.  Read first: `run_log`.
"""
