"""Logs steps, measures memory, draws timelines and computes shapes on the meta device.

May import: schedule, numerics.  Read first: `run_log`.
"""
