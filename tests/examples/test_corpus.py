"""The corpus of examples/gpt: the same bytes for all ranks, windows that use every token once, errors that say why."""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.shared.gpt_example import gpt_example

with gpt_example() as example:
    corpus = example("corpus")
TokenWindows, read_corpus, yardsticks = corpus.TokenWindows, corpus.read_corpus, corpus.yardsticks


# ---------------------------------------------------------------------------------------------------- windows


@given(st.integers(2, 300), st.integers(1, 40))
def test_windows_predict_every_token_but_the_first_once(num_tokens: int, sequence: int) -> None:
    assume(num_tokens > sequence)
    windows = TokenWindows(np.arange(num_tokens) % 256, sequence)
    labels = torch.cat([windows[i][1] for i in range(len(windows))])
    assert labels.tolist() == (np.arange(1, num_tokens - windows.dropped) % 256).tolist()
    for i in range(len(windows)):
        inputs, targets = windows[i]
        assert inputs.dtype == targets.dtype == torch.int64 and len(inputs) == len(targets) == sequence
        assert torch.equal(inputs[1:], targets[:-1])
    assert windows.dropped < sequence and len(labels) + windows.dropped == num_tokens - 1


def test_windows_end_where_the_tokens_do() -> None:
    windows = TokenWindows(np.arange(9, dtype=np.uint8), 4)
    assert len(list(windows)) == len(windows) == 2  # type: ignore[call-overload]
    with pytest.raises(IndexError, match="window -1 of 2"):
        windows[-1]


@pytest.mark.parametrize(
    ("tokens", "sequence", "message"),
    [
        (np.arange(4), 4, "text: 4 tokens found, 5 needed"),
        (np.arange(4), 0, "sequence: 0; legal: 1 or more"),
        (np.arange(4.0), 2, "text: shape .*float64; legal"),
        (np.zeros((4, 2), int), 2, r"text: shape \(4, 2\)"),
    ],
)
def test_tokens_without_a_window_are_refused(tokens: Any, sequence: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TokenWindows(tokens, sequence, "text")


# ----------------------------------------------------------------------------------------------------- corpus


@pytest.fixture(scope="module")
def library() -> Any:
    return read_corpus()


def test_the_default_corpus_is_the_standard_library_cut_by_file(library: Any) -> None:
    root = Path(sysconfig.get_paths()["stdlib"])
    assert len(library.train) > 5_000_000 and 0.01 < len(library.held_out) / len(library.train) < 0.2
    train, held_out = library.train.tobytes(), library.held_out.tobytes()
    for module in ("argparse.py", "json/decoder.py", "typing.py", "zipfile.py", "os.py", "enum.py"):
        if (root / module).is_file():
            text = (root / module).read_bytes()
            assert (text in train) != (text in held_out), module
    assert (root / "test" / "__init__.py").is_file() <= (b"test.support" not in train[:200])
    assert library.sha256 in str(library) and read_corpus().sha256 == library.sha256


def test_folders_are_read_in_order_of_path_without_hidden_and_binary_files(tmp_path: Path) -> None:
    expected = []
    for i in range(45):
        path = tmp_path / f"{i % 3}" / f"{i:02}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"<{i}>")
        expected.append((path.relative_to(tmp_path).as_posix(), f"<{i}>"))
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("secret")
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    texts = [text for _, text in sorted(expected)]
    found = read_corpus(tmp_path)
    assert found.num_files == 45
    assert found.held_out.tobytes().decode() == texts[19] + texts[39]
    assert found.train.tobytes().decode() == "".join(t for i, t in enumerate(texts) if i not in (19, 39))
    assert found.sha256 == hashlib.sha256("".join(texts).encode()).hexdigest()


def test_one_file_holds_out_its_last_twentieth(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(200)))
    found = read_corpus(tmp_path / "a.txt")
    assert found.train.tobytes() + found.held_out.tobytes() == bytes(range(200))
    assert (len(found.train), len(found.held_out), found.num_files) == (190, 10, 1)


@pytest.mark.parametrize("content", [None, b"", b"tiny"])
def test_a_corpus_that_is_missing_empty_or_tiny_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    found = (
        "is not there"
        if content is None
        else f"{len(content)} bytes found in 1 text files, 20 or more needed"
    )
    with pytest.raises(ValueError, match=f"data = .*{found}.*legal: a text file, or a folder"):
        read_corpus(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="0 bytes found in 0 text files"):
        read_corpus(tmp_path / "empty")


def test_a_corpus_without_a_batch_says_what_was_found_and_what_is_needed(library: Any) -> None:
    small = replace(library, name="notes", train=library.train[:1000], held_out=library.held_out[:50])
    train, held_out = small.windows(sequence=49, global_batch=20)
    assert (len(train), len(held_out)) == (20, 1)
    with pytest.raises(
        ValueError, match="data = 'notes': 1,000 bytes found to train on and 50 held out, 1,030 and 50 needed"
    ):
        small.windows(sequence=49, global_batch=21)
    with pytest.raises(ValueError, match="and 50 held out, 51 and 51 needed.*now 50"):
        small.windows(sequence=50, global_batch=1)


def test_yardsticks_are_what_the_compressors_make_of_the_text() -> None:
    generator = np.random.default_rng(0)
    noise = generator.integers(0, 256, 1 << 16, dtype=np.uint8)
    found = yardsticks(noise)
    assert 7.9 < found.unigram <= 8 < found.zlib < 8.1 and 8 < found.lzma < 8.1
    halves = yardsticks(np.tile(np.array([65, 66], np.uint8), 5000))
    assert halves.unigram == 1 and halves.zlib < 0.1 and halves.lzma < 0.2
    assert yardsticks(noise, limit_bytes=4) == yardsticks(noise[:4]) != found
