"""Decides where optimizer state rests, and streams it to its update.

May import: schedule, memory.  Read first: `placement`.
"""
