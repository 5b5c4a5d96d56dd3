"""Messages of a save or load are heard, whatever else happens to the ranks that sent them."""

from __future__ import annotations

import pytest

from colossal_lite.checkpoint.manifest import CheckpointError
from colossal_lite.checkpoint.rendezvous import SaveRendezvous
from colossal_lite.distributed.key_value_store import LocalStore


def test_a_message_that_was_sent_before_its_sender_stopped_is_heard() -> None:
    store = LocalStore()

    def heard() -> str:
        SaveRendezvous(store, "load", "load", 0, 2, 1.0, lambda: "").say("choose", "refused")
        return "rank 0 stopped: FolderOwnedError"

    assert SaveRendezvous(store, "load", "load", 1, 2, 1.0, heard).hear("choose") == "refused"


def test_a_sender_that_stopped_without_a_message_is_named() -> None:
    meeting = SaveRendezvous(LocalStore(), "load", "load", 1, 2, 5.0, lambda: "rank 0 stopped: KeyError")
    with pytest.raises(
        CheckpointError, match="^rank 0 stopped: KeyError\nrank 1: load waited for 'choose' of ranks 0"
    ):
        meeting.hear("choose")
