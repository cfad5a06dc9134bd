"""The texts, as their packages write them."""

import gzip
import zlib
from pathlib import Path

import pytest

from training import texts
from training.texts import Source, read, split


def written(root: Path, name: str, data: bytes) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def test_a_meaning_is_an_answer(tmp_path: Path) -> None:
    gloss = 'a plot of ground; "the garden was in bloom"; "an herb garden"'
    lines = f"  1 a licence\n03 14 n 02 garden 0 flower_garden 0 001 @ 1 n 0000 | {gloss}  \n"
    written(tmp_path, "usr/share/wordnet/data.noun", lines.encode())
    for part in ("verb", "adj", "adv"):
        written(tmp_path, f"usr/share/wordnet/data.{part}", b"")
    written(tmp_path, "usr/share/wordnet/cntlist.rev", b"garden%1:15:00:: 1 12\n")
    [(question, answer)] = texts.wordnet(tmp_path)
    assert "garden" in question
    assert answer.startswith("A garden is a plot of ground.")
    assert answer.endswith("The garden was in bloom.")


def test_words_that_nobody_uses_are_left_out(tmp_path: Path) -> None:
    line = b"03 14 n 01 zarf 0 001 @ 1 n 0000 | a holder for a coffee cup  \n"
    for part in ("noun", "verb", "adj", "adv"):
        written(tmp_path, f"usr/share/wordnet/data.{part}", line if part == "noun" else b"")
    written(tmp_path, "usr/share/wordnet/cntlist.rev", b"garden%1:15:00:: 1 12\n")
    assert list(texts.wordnet(tmp_path)) == []


def test_novels_are_paragraphs(tmp_path: Path) -> None:
    def value(lines: list[str]) -> bytes:
        strings = b"".join(
            b"\x00\x04\x00\x09" + len(line).to_bytes(4, "big") + line.encode() for line in lines
        )
        return b"size" + zlib.compress(b"X\n\x00\x00\x00\x10" + strings)

    one = ["CHAPTER ONE", "", "It was a fine day -- such as _few_ had seen", "in that country.", ""]
    two = ["The next novel begins in another way than this one."]
    written(
        tmp_path,
        "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb",
        value(one) + value(two),
    )
    assert list(texts.austen(tmp_path)) == [
        ("It was a fine day - such as few had seen in that country.",),
        ("The next novel begins in another way than this one.",),
    ]


def test_the_jargon_file_is_questions_and_answers(tmp_path: Path) -> None:
    meaning = "A program that waits in the dark for something to do, and is seldom seen."
    text = f"Chapter\n\n   {meaning}\n\n   :daemon: n.\n\n   [MIT] {meaning}\n"
    path = "usr/share/doc/jargon-text/jargon.txt.gz"
    written(tmp_path, path, gzip.compress(text.encode()))
    prose, (question, answer) = texts.jargon(tmp_path)
    assert prose == (meaning,)
    assert "daemon" in question
    assert answer == meaning


def test_a_book_of_pages_is_prose(tmp_path: Path) -> None:
    sentence = "Hackers are people who take things apart, and who seldom put them together again."
    page = f"<html><head>no</head><body><p class=x>{sentence}</p><br>\n<br>short</body></html>"
    written(tmp_path, "usr/share/doc/cfi-en/html/ch1web.htm", page.encode())
    assert list(texts.copyright_does_not_exist(tmp_path)) == [(sentence,)]


def test_what_is_rude_is_left_out(tmp_path: Path) -> None:
    said = [("A fine day",), ("An offensive word",), ("Who?", "a racial thing")]
    source = Source("", "a test", "none", lambda _: iter(said))
    assert read(source, tmp_path) == [("A fine day",)]


@pytest.mark.parametrize("count", [1, 39, 400])
def test_nothing_is_trained_with_that_is_held_out(count: int) -> None:
    documents = [(str(number),) for number in range(count)]
    kept, held = split(documents)
    assert sorted([*kept, *held]) == sorted(documents)
    assert len(held) == count // texts.HELD_OUT
