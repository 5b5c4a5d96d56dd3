"""Ends a script: prints one message of the rank that failed first, and sets exit code and torchrun's error file.

Note: which rank prints.
Python hands an error that ends a script to `sys.excepthook`.  `launch` and `options` install ours, in each process that
a user started.
A refusal is printed without a traceback, and the exit code is 2: ConfigError, LaunchError, a ValueError of this
package.  Ranks that do not meet (CommError) have no traceback either.  For any other error the frames of the user's
files are printed, and the frame that raised it.  A rank that fails because another did prints nothing.  Without
torchrun, whose last lines name it, it prints a line.  The full traceback is in the log of a rank that has a `Run`;
Python's development mode prints it too.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from colossal_lite.config.errors import ConfigError
from colossal_lite.distributed.communicator import CommError
from colossal_lite.engine.stopping import Stopped
from colossal_lite.launcher import env
from colossal_lite.launcher.env import Launch, LaunchError

REFUSED = 2
MOST_FRAMES = 6
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
OptionsOf = TypeVar("OptionsOf")


def options(kind: type[OptionsOf]) -> tuple[OptionsOf, list[str]]:
    """The command line of this script: its fields in the dataclass `kind`, and the rest, for `launch(overrides=...)`.

    Ends the script after `--help`, and with 2 for an illegal value. One rank of a node prints."""
    import tyro

    ScriptEnd.installed()
    given, rest = tyro.cli(kind, return_unknown_args=True, console_outputs=env.speaks(env.environment()))
    return given, rest


class ScriptEnd:
    """The `sys.excepthook` of a rank."""

    def __init__(self, before: Hook) -> None:
        self._before = before
        self.place: Launch | None = None
        """This rank's place; None until it is known."""
        self._heard = (0, "")

    @classmethod
    def installed(cls) -> ScriptEnd:
        """The hook of this process, which stays until the process ends."""
        hook = sys.excepthook
        if not isinstance(hook, cls):
            hook = sys.excepthook = cls(hook)
        return hook

    def leaving(self, error: BaseException, first_failure: str) -> None:
        """Called when an error leaves a context: records which rank failed first, while the store still answers."""
        self._heard = (id(error), first_failure)
        if isinstance(error, Stopped) and error.code:  # Python does not count it as an error
            _record(error, str(error))

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, KeyboardInterrupt) or hasattr(sys, "ps1"):
            self._before(kind, error, trace)
            return
        refused = (
            isinstance(error, ConfigError | LaunchError) or isinstance(error, ValueError) and _is_ours(error)
        )
        if said := self._said(error, refused):
            print(said, file=sys.stderr, flush=True)
        of, first = self._heard
        _record(error, first.partition("\n")[0] if of == id(error) and self._follows(first) else str(error))
        if refused:
            raise SystemExit(REFUSED)

    def _follows(self, first_failure: str) -> bool:
        """Whether another rank has failed first."""
        rank = self.place.rank if self.place else None
        return bool(first_failure) and not first_failure.startswith(f"rank {rank} ")

    def _said(self, error: BaseException, refused: bool) -> str:
        """The text that this rank prints."""
        of, first = self._heard
        rank = self.place.rank if self.place else None
        if of == id(error) and self._follows(first):
            has_agent = self.place is not None and self.place.has_agent
            return "" if has_agent else f"rank {rank} ends, as {first.partition(chr(10))[0]}"
        if isinstance(error, ConfigError) and of != id(error) and not env.speaks(env.environment()):
            return ""  # all ranks find the same fault
        who = f"rank {rank}: " if self.place and self.place.world_size > 1 else ""
        if refused or isinstance(error, CommError):
            at = "".join(f"\n  {f.filename}, line {f.lineno}: {f.line}" for f in _user_frame(error))
            return "\n".join([f"{who}{error}", *getattr(error, "__notes__", ())]) + at
        return who + "".join(_trimmed(traceback.TracebackException.from_exception(error)).format()).rstrip()


def _record(error: BaseException, text: str) -> None:
    """Write the text to the error file that torchrun gave this rank, if any; torchrun's last lines show it."""
    kind = type(type(error).__name__, (Exception,), {"__module__": "builtins"})
    try:
        raise kind(text) from None  # without its traceback, causes and notes, which are printed elsewhere
    except Exception as told:
        get_error_handler().record_exception(told.with_traceback(None))


def _is_ours(error: BaseException) -> bool:
    """Whether this package raised it."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("colossal_lite.")


def _user_frame(error: BaseException) -> list[traceback.FrameSummary]:
    """The last line of the user's own files, before lines of installed packages; none if no such line was run."""
    hidden = _hidden_files()
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not hidden(frame.filename)]
    own = [frame for frame in theirs if "site-packages" not in frame.filename and frame.line]
    return (own or theirs)[-1:]


def _hidden_files() -> Callable[[str], bool]:
    """Whether a file is ours, torch's or Python's."""
    ours = {
        module.__file__
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("colossal_lite", "torch") and getattr(module, "__file__", None)
    }
    library = sysconfig.get_path("stdlib")

    def is_hidden(path: str) -> bool:
        in_library = path.startswith(library) and "site-packages" not in path
        return path in ours or in_library or path.startswith("<frozen")

    return is_hidden


def _trimmed(told: traceback.TracebackException) -> traceback.TracebackException:
    """The last frames of the user's files, and the last of all."""
    if sys.flags.dev_mode:
        return told
    hidden = _hidden_files()
    kept = [frame for frame in told.stack[:-1] if not hidden(frame.filename)][-MOST_FRAMES:] + told.stack[-1:]
    told.stack = traceback.StackSummary.from_list(
        traceback.FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in kept
    )
    for other in filter(None, (told.__cause__, told.__context__)):
        _trimmed(other)
    return told
