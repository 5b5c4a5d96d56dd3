"""Token files, packed documents, rows of datasets, and a tokenizer made of one's own text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossal_lite.data.batch_checks import StatedSizes, check_batch
from colossal_lite.data.dataloader import dataloader
from colossal_lite.data.loader import Place
from colossal_lite.models import GPT, GPTConfig
from tests.shared.gpt_example import gpt_example

with gpt_example() as example:
    tokens = example("tokens")
PackedDocuments, collate_rows = tokens.PackedDocuments, tokens.collate_rows
read_tokens, train_bpe, write_tokens = tokens.read_tokens, tokens.train_bpe, tokens.write_tokens


@pytest.mark.parametrize(("vocabulary", "dtype"), [(300, "uint16"), (1 << 16, "uint16"), (70_000, "uint32")])
def test_a_token_file_is_raw_ids_in_the_narrowest_dtype(vocabulary: int, dtype: str, tmp_path: Path) -> None:
    ids = np.arange(vocabulary)
    write_tokens(tmp_path / "train.bin", ids, vocabulary)
    assert (tmp_path / "train.bin").read_bytes() == ids.astype(dtype).tobytes()
    found = read_tokens(tmp_path / "train.bin")
    assert isinstance(found, np.memmap) and found.dtype == dtype and np.array_equal(found, ids)


def test_nanogpts_files_need_no_sidecar(tmp_path: Path) -> None:
    np.array([1, 2, 60_000], np.uint16).tofile(tmp_path / "val.bin")
    assert read_tokens(tmp_path / "val.bin").tolist() == [1, 2, 60_000]
    with pytest.raises(ValueError, match="6 bytes; legal: some ids of 4 bytes"):
        read_tokens(tmp_path / "val.bin", "uint32")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda p: p.write_bytes(p.read_bytes()[:-1]), "5 bytes; legal: 3 ids of 2 bytes"),
        (lambda p: p.write_bytes(b""), "0 bytes; legal: 3 ids"),
        (lambda p: p.unlink(), "is no token file"),
        (lambda p: p.with_name("a.bin.json").write_text("{"), "is no token file"),
        (lambda p: p.with_name("a.bin.json").write_text('{"dtype": "O"}'), "dtype 'O'"),
    ],
)
def test_what_is_no_token_file_is_said(spoil: Any, says: str, tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", [1, 2, 3], 4)
    spoil(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=says):
        read_tokens(tmp_path / "a.bin")
    with pytest.raises(ValueError, match=r"legal: 0 to 2 \(the vocabulary\)"):
        write_tokens(tmp_path / "b.bin", [3], 3)


@given(st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=3, max_size=9), st.integers(1, 7))
def test_packing_numbers_documents_and_restarts_positions(documents: list[list[int]], sequence: int) -> None:
    stream = [token for document in documents for token in (*document, 0)] + [1] * sequence
    packed = PackedDocuments(np.array(stream), sequence, end=0)
    for index in range(len(packed)):
        item = {key: value.tolist() for key, value in packed[index].items()}
        number, place = 1, 0
        for t, token in enumerate(item["input_ids"]):
            assert token == stream[index * sequence + t]
            assert (item["attention_mask"][t], item["position_ids"][t]) == (number, place)
            assert item["labels"][t] == (-100 if token == 0 else stream[index * sequence + t + 1])
            number, place = (number + 1, 0) if token == 0 else (number, place + 1)


def test_packed_documents_give_the_logits_of_each_alone() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=11, layers=2, heads=2, width=8, sequence=12)).double().eval()
    documents = [[3, 4, 5, 0], [6, 7, 0], [8, 9, 1, 2, 0]]
    stream = np.array([token for document in documents for token in document] + [1])
    item = PackedDocuments(stream, 12, end=0)[0]
    batch = {key: value[None] for key, value in item.items()}
    check_batch(batch, StatedSizes(vocabulary=11))
    with torch.no_grad():
        together = model(**{key: value for key, value in batch.items() if key != "labels"})[0]
        alone = torch.cat([model(torch.tensor([document]))[0] for document in documents])
    assert torch.allclose(together, alone, rtol=1e-12, atol=1e-12)


def test_rows_of_a_dataset_become_batches() -> None:
    """The form of Hugging Face `datasets`: len(d), and d[i] is a dict of lists."""
    rows = [{"input_ids": [i, i + 1, i + 2], "text": "left out"} for i in range(4)]
    loader = dataloader(rows, place=Place(2, 1), global_batch=4, shuffle=False, collate=collate_rows)
    (batch,) = list(loader)
    assert batch["input_ids"].tolist() == [[2, 3, 4], [3, 4, 5]]
    assert batch["labels"].tolist() == [[3, 4, -100], [4, 5, -100]]
    check_batch(batch)
    with pytest.raises(ValueError, match=r"lengths \[1, 2\]"):
        collate_rows([{"input_ids": [1]}, {"input_ids": [1, 2]}])


def test_a_tokenizer_of_ones_own_text_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tokenizers")
    text = "def f(x):\n    return x + 1  # \u00e9\u4e2d\n" * 50
    tokenizer = train_bpe([text], 300)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text and len(ids) < len(text) / 2 and max(ids) < 300
    assert tokenizer.token_to_id("<|end|>") == 0
    with pytest.raises(ValueError, match="257 or more"):
        train_bpe([text], 256)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"colossal_lite\[tok\]"):
        train_bpe([text], 300)
