"""Pages of docs and README: links and commands lead somewhere, sentences are short, figures have command and date."""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest
import tyro

from colossal_lite.launcher import command
from tests.shared.docs_pages import MADE
from tests.shared.docs_pictures import PICTURES
from tests.shared.pages import DOCS, ROOT, Page, anchor_of, blocks, long_sentences, pages, sentences, words

EACH = [pytest.param(page, id=page.name) for page in pages()]


@pytest.mark.parametrize("page", EACH)
def test_every_link_leads_to_a_file_and_an_anchor_of_it(page: Page) -> None:
    for target in page.links():
        file, _, anchor = target.partition("#")
        path = (page.path.parent / file).resolve() if file else page.path
        assert path.exists(), f"{page.name}: {target}: no such file"
        assert not anchor or anchor in Page(path).anchors, f"{page.name}: {target}: no such heading"


@pytest.mark.parametrize("page", EACH)
def test_every_path_in_the_text_exists(page: Page) -> None:
    missing = [path for path in page.paths() if not (ROOT / path).exists()]
    lost = sorted(set(missing) - MADE_BY_A_READER)
    assert not lost, f"{page.name}: no such file, seen from the root, nor in MADE_BY_A_READER: {lost}"


MADE_BY_A_READER = {
    "train.py",
    "config.py",
    "day/part1.json",
    "tasks/NAME",
    "colossal_lite/layers/tensor_toy.py",
}


@pytest.mark.parametrize("page", EACH)
def test_no_sentence_is_longer_than_thirty_words(page: Page) -> None:
    long = long_sentences(page.prose)
    assert not long, f"{page.name}: split these sentences:\n" + "\n".join(long)


def command_of(code: str) -> list[str]:
    """The words of a command, without its environment; empty for other code."""
    try:
        parts = shlex.split(code)
    except ValueError:
        return []
    parts = parts[len(list(takewhile(lambda part: re.match(r"[A-Z_]+=", part), parts))) :]
    return parts if parts and parts[0] in ("pytest", "python", "torchrun", "colossal-lite") else []


def problems_of(parts: list[str]) -> list[str]:
    """What of a command is not there: files, modules, subcommands, options of a script."""
    wrong = [part for part in parts if re.match(r"(tests|examples)/", part) and not (ROOT / part).exists()]
    if parts[0] == "colossal-lite" and len(parts) > 1:
        wrong += problems_of_ours(parts[1:])
    if parts[:2] == ["python", "-m"] and importlib.util.find_spec(parts[2]) is None:
        wrong.append(f"module {parts[2]}")
    if parts[0] == "python" and len(parts) > 1 and (ROOT / parts[1]).is_file():
        source = (ROOT / parts[1]).read_text()
        wrong += [part for part in parts[2:] if part.startswith("--") and f'"{part}"' not in source]
    return wrong


def problems_of_ours(arguments: list[str]) -> list[str]:
    """What the parser of `colossal-lite` says of a command; of a command's name alone, whether there is such."""
    if len(arguments) == 1 and f'subcommand("{arguments[0]}")' in inspect.getsource(command):
        return []
    try:
        _, rest = tyro.cli(command.Command, args=arguments, return_unknown_args=True, console_outputs=False)
    except SystemExit:
        return [" ".join(arguments)]
    return [option for option in rest if re.match(r"--(?!parallel|memory|zero)", option)]


@pytest.mark.parametrize("page", EACH)
def test_every_command_names_what_is_there(page: Page) -> None:
    wrong = {code: found for code in page.code() if (p := command_of(code)) and (found := problems_of(p))}
    assert not wrong, f"{page.name}: {wrong}"


def test_commands_are_told_from_other_code_and_faults_in_them_are_found() -> None:
    assert command_of("TRITON_INTERPRET=1 pytest tests/interpreted") == ["pytest", "tests/interpreted"]
    assert command_of("zero.stage=3") == [] == command_of("colossal_lite")
    assert problems_of(["pytest", "tests/gone.py"]) == ["tests/gone.py"]
    assert problems_of(["colossal-lite", "lunch"]) == ["lunch"]
    assert problems_of(["colossal-lite", "doctor", "--lunch"]) == ["--lunch"]
    assert problems_of(["colossal-lite", "plan", "config.py"]) == ["plan config.py"]
    assert problems_of(["colossal-lite", "plan"]) == []
    assert problems_of(["python", "-m", "tests.shared.gone"]) == ["module tests.shared.gone"]
    assert problems_of(["python", "examples/benchmarks/cpu_peers.py", "--lunch", "--world", "2"]) == [
        "--lunch"
    ]


def test_a_drawn_schedule_is_what_its_command_prints() -> None:
    texts = [text for page in pages() for _, text in blocks(page.text, "text")]
    drawings = [text for text in texts if text.startswith("$ colossal-lite schedule")]
    assert drawings
    for text in drawings:
        command, _, drawn = text.removeprefix("$ colossal-lite ").partition("\n")
        run = subprocess.run(
            [sys.executable, "-m", "colossal_lite", *command.split()],
            cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, text=True, capture_output=True, timeout=60,
        )  # fmt: skip
        assert run.stdout == drawn, run.stderr


def test_the_questions_are_answered_by_one_file_each() -> None:
    text = (DOCS / "architecture.md").read_text()
    rows = re.findall(r"^\| (.+\?) \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len({question for question, _ in rows}) == len(rows) == text.count("? | ") >= 20
    steps = re.findall(r"^\| (?:\d+ )?\| .+ \| `([^`]+)` \|$", text, re.MULTILINE)
    assert len(steps) >= 14
    assert [path for path in [path for _, path in rows] + steps if not (ROOT / path).is_file()] == []


def test_every_page_has_its_place_in_the_site() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    placed = set(re.findall(r"[\w/.-]+\.md", text))
    there = {page.path.relative_to(DOCS).as_posix() for page in pages()[1:]}
    assert there <= placed, f"add a line under `nav:` in mkdocs.yml for {sorted(there - placed)}"
    assert placed <= there, f"mkdocs.yml names pages that are not there: {sorted(placed - there)}"


@pytest.mark.parametrize("path", MADE, ids=lambda path: path.name)
def test_what_a_program_writes_of_docs_is_what_is_committed(path: Path) -> None:
    assert path.exists() and path.read_text() == MADE[path](), "run python -m tests.shared.docs_pages"


def test_every_picture_is_made_and_shown() -> None:
    shown = {Path(target).name for page in pages() for target in page.links() if target.endswith(".svg")}
    assert {path.name for path in (DOCS / "pictures").iterdir()} == shown == {f"{n}.svg" for n in PICTURES}


def test_a_figure_has_its_command_and_its_date() -> None:
    lacking = [f"{page.name}: {title}" for page in pages() for title in sections_without_source(page)]
    assert not lacking, f"name the command and the date of these figures: {lacking}"


def sections_without_source(page: Page) -> list[str]:
    """Titles of sections with a table of measured figures that lack a command or a date."""
    found = []
    for section in re.split(r"^(?=#+ )", page.prose, flags=re.MULTILINE):
        cells = [cell.strip() for row in re.findall(r"^\|(.+)\|$", section, re.M) for cell in row.split("|")]
        if sum(bool(FIGURE.fullmatch(cell)) for cell in cells) < 4:
            continue
        command = re.search(r"`[^`]*\b(python|pytest|colossal-lite)\b[^`]*`", section)
        if not (command and re.search(r"\b(November|December|January) 20\d\d|the same day", section)):
            found.append(section.splitlines()[0])
    return found


FIGURE = re.compile(r"(?!\d{4}\.\d{5})[\d,]*\.\d+( (%|s|ms|MB|[KMG]iB))?|\d+ (%|s|ms|MB|[KMG]iB)|\de-\d+")


def test_a_table_of_figures_without_a_command_or_a_date_is_found(tmp_path: Path) -> None:
    table = "| a | b |\n|---|---|\n| 1.5 | 2.0 MB |\n| 3 ms | 0.1 % |\n"
    told = {
        "## no": table,
        "## date": f"22 November 2026\n\n{table}",
        "## command": f"`python x.py`\n\n{table}",
    }
    whole = f"## both\n\n`python x.py`, 22 November 2026\n\n{table}"
    page = tmp_path / "page.md"
    page.write_text("\n".join([*(f"{title}\n\n{text}" for title, text in told.items()), whole]))
    assert sections_without_source(Page(page)) == list(told)


def test_sentences_of_paragraphs_items_and_cells_are_counted_apart() -> None:
    text = (
        "# A title\nOne: two; two. Three `a b c`\nfour.\n\n- five\n- six [seven](x.md) eight\n\n| a | b c |\n"
    )
    found = [each for each in sentences(text) if words(each)]
    assert found == ["One: two; two.", "Three CODE four.", "five", "six seven eight", "a", "b c"]
    assert long_sentences("One (two.) Three: four; five.", 2) == ["3 words: Three: four; five."]
    assert anchor_of("`plan`: what, and why?") == "plan-what-and-why"
