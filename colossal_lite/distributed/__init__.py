"""Process groups, the one communicator and its ledger, shared memory, and the watchdog.

May import: sharding, numerics, transforms, observe.  Read first: `communicator`.
"""
