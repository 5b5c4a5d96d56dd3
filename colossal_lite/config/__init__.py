"""Turns a dict or file into one frozen, validated value; all schemas.

May import: sharding, schedule.  Read first: `config`.
"""
