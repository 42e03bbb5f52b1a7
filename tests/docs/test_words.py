"""The documents are written in short sentences, without the habits that readers stumbled over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.docs import sentences
from deploy.docs.site import CHECKOUT, root_pages

WRITTEN = sentences.documents()
# Pages that documents() does not list; their words are checked all the same.
WORDS = [
    *WRITTEN,
    *(CHECKOUT / name for name in root_pages() if CHECKOUT / name not in WRITTEN),
]
FORBIDDEN = re.compile(
    r"\b(nobody|somebody|whom|whoever|goes on|go on|went on|going on|so long as|so many|so long|besides|mostly|"
    r"is told|are told|was told|were told|be told|is asked anew|by a hair)\b",
    re.IGNORECASE,
)


def ids(path: Path) -> str:
    return str(path.relative_to(CHECKOUT))


def test_sentences_are_short_on_average() -> None:
    every = [
        one for path in WRITTEN for one in sentences.sentences(path.read_text(encoding="utf-8"))
    ]
    assert len(every) > 500
    assert sentences.mean(every) <= sentences.MEAN


@pytest.mark.parametrize("document", WRITTEN, ids=ids)
def test_no_sentence_is_too_long(document: Path) -> None:
    found = sentences.sentences(document.read_text(encoding="utf-8"))
    assert sentences.mean(found) <= sentences.MEAN
    assert [one for one in found if len(sentences.words_of(one)) > sentences.LONGEST] == []


@pytest.mark.parametrize("document", WORDS, ids=ids)
def test_no_forbidden_habit(document: Path) -> None:
    text = re.sub(
        r"^(```|~~~).*?^\1|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.M | re.S
    )
    found = [
        text[max(at.start() - 40, 0) : at.end() + 20].replace("\n", " ")
        for at in FORBIDDEN.finditer(text)
    ]
    assert found == []


def test_a_long_sentence_is_found() -> None:
    text = (
        "Short. "
        + "Word " * 36
        + "end.\n\n| cell of six words and one | 1 |\n\n```\n"
        + "code " * 50
        + "\n```\n"
    )
    found = sentences.sentences(text)
    assert [len(sentences.words_of(one)) for one in found] == [1, 37, 6]
