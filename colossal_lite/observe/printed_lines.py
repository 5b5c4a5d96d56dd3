"""Prints lines of a run: a reader that is gone, or a full disk, ends no run.

Note: Ctrl-C beside `| tee`.
A terminal sends it to all programs of the line.  So the reader of the pipe ends first, and the run must still save.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import suppress
from typing import TextIO

from rich.console import Console

OURS = ("colossal_lite", "torch", "contextlib")
"""Packages in which a warning never points at a line."""


def tell(text: str, file: TextIO | None = None) -> None:
    """Print a line: into `file`, or on standard output. A line that it refuses goes to standard error, or is lost."""
    stream = file or sys.stdout
    try:
        print(text, file=stream, flush=True)
    except OSError as error:  # a full disk, or no reader
        if isinstance(error, BrokenPipeError):
            drop_output(stream)
        if stream is not sys.stderr:
            tell(text, sys.stderr)


def drop_output(stream: TextIO) -> None:
    """Let this and all later output go nowhere: its reader is gone. Else Python fails once more at its end."""
    with suppress(OSError), open(os.devnull, "w") as nowhere:  # a stream may have no descriptor
        os.dup2(nowhere.fileno(), stream.fileno())


class RunConsole(Console):
    """A console that drops its lines where their reader is gone. Rich's own ends the process there, with code 1."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        drop_output(sys.stdout)


def warn(text: str) -> None:
    """Warn at the line of a user's code that runs now: the innermost one outside of this package and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in OURS:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)
