"""Names what starts a rank: `launch` (join.py), and the environment that it reads (env.py)."""

from __future__ import annotations

from colossal_lite import stands_aside

if not stands_aside(__name__):
    from .env import LaunchError
    from .join import findings, launch, run

__all__ = ["LaunchError", "findings", "launch", "run"]
