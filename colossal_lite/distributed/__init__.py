"""Process groups, the one communicator and its ledger, shared memory, and the watchdog.

May import: sharding, transforms.  Read first: `communicator`.
"""
