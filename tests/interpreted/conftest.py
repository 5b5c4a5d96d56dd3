"""Tests of the Triton kernels in the interpreter: TRITON_INTERPRET=1 pytest tests/interpreted

They need a process of their own, because triton is interpreted or compiled for a whole process; the suite
runs them so from tests/kernels/test_kernels_interpreted.py.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["test_*.py"]
