"""Logs steps, measures memory, draws timelines and computes shapes on the meta device.

May import: schedule.  Read first: `run_log`.
"""
