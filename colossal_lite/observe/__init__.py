"""Logs steps, measures memory, draws timelines and computes shapes on the meta device.

May import: schedule, config, numerics.  Read first: `run_log`.
"""
