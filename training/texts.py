"""The texts: what a few of Debian's packages carry in plain English, public domain or as free.

Each source is a function from the directory of an unpacked package to documents. A document is one
turn or two: one is prose, two are a question and its answer.
"""

import gzip
import html
import random
import re
import subprocess
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

Document = tuple[str, ...]
HELD_OUT = 40
"""One document in this many is kept from training, to measure with."""


RUDE = re.compile(
    r"(?i)\b(offensive|derogatory|disparag\w+|obscen\w+|vulgar\w*|slurs?|ethnic|races?|racial|negro\w*|"
    r"jew\w*|gyps\w+|savages?|sexual\w*|sex|sexy|intercourse|copulat\w+|prostitut\w+|genital\w*|penis|vagina\w*|"
    r"fuck\w*|shit\w*|bitch\w*|whores?|cunt|crap\w*|nazis?|rape[ds]?|suicid\w+|heroin|torture\w*)\b"
)
"""Documents with such words are left out: a small model repeats what it has read."""


@dataclass(frozen=True, slots=True)
class Source:
    package: str
    """Of Debian; empty for what is written here."""
    what: str
    licence: str
    read: Callable[[Path], Iterator[Document]]


def unpack(package: str, into: Path) -> Path:
    """Downloads a Debian package and unpacks it, without installing it, unless that was done."""
    directory = into / package
    if not directory.exists():
        into.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", package], cwd=into, check=True)
        [archive] = into.glob(f"{package}_*.deb")
        unfinished = into / f"{package}.unfinished"
        subprocess.run(["dpkg-deb", "-x", archive, unfinished], check=True)
        unfinished.rename(directory)
    return directory


def read(source: Source, downloads: Path) -> list[Document]:
    found = source.read(unpack(source.package, downloads) if source.package else downloads)
    return [document for document in found if not RUDE.search(" ".join(document))]


def split(documents: Sequence[Document], seed: int = 0) -> tuple[list[Document], list[Document]]:
    """Documents to train with, and those held out, each in random order."""
    shuffled = list(documents)
    random.Random(seed).shuffle(shuffled)
    return shuffled[len(shuffled) // HELD_OUT :], shuffled[: len(shuffled) // HELD_OUT]


def pieces(paragraphs: Iterator[str], least: int = 700) -> Iterator[Document]:
    """Prose in documents of several paragraphs, each of at least `least` characters."""
    held: list[str] = []
    for paragraph in paragraphs:
        held.append(paragraph)
        if sum(map(len, held)) >= least:
            yield ("\n\n".join(held),)
            held = []
    if held:
        yield ("\n\n".join(held),)


def plain(text: str) -> str:
    """Text in one line, with quotation marks and dashes as they are typed."""
    for old, new in (("“", '"'), ("”", '"'), ("‘", "'"), ("’", "'"), ("``", '"'), ("''", '"')):
        text = text.replace(old, new)
    text = re.sub(r"\s*(?:--+|—|–)\s*", " - ", text.replace("_", ""))
    return re.sub(r"\s+", " ", text).strip()


def austen(root: Path) -> Iterator[Document]:
    """Six novels, as vectors of lines in R's database of values. A value is 4 bytes and a zlib
    stream, in which a string is 0x00040009, its length, and its bytes."""
    [path] = root.glob("usr/lib/R/site-library/janeaustenr/data/Rdata.rdb")
    rest = path.read_bytes()
    while rest:
        stream = zlib.decompressobj()
        data = stream.decompress(rest[4:])
        rest = stream.unused_data
        yield from pieces(_paragraphs(_strings(data)))


def _strings(data: bytes) -> Iterator[str]:
    at = data.find(b"\x00\x04\x00\x09")
    while at >= 0 and data[at : at + 4] == b"\x00\x04\x00\x09":
        end = at + 8 + int.from_bytes(data[at + 4 : at + 8], "big")
        yield data[at + 8 : end].decode()
        at = end


def _paragraphs(lines: Iterator[str]) -> Iterator[str]:
    """Paragraphs of prose: what is short or shouts is a heading."""
    held: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            held.append(line)
            continue
        text, held = plain(" ".join(held)), []
        if len(text) > 40 and not text.isupper():
            yield text


def copyright_does_not_exist(root: Path) -> Iterator[Document]:
    for path in sorted(root.glob("usr/share/doc/cfi-en/html/ch*web.htm")):
        text = path.read_text("latin-1")
        text = re.sub(r"(?is)<(head|script|style).*?</\1>", " ", text)
        text = re.sub(r"(?i)<br>\s*(</?\w[^>]*>\s*)*<br>|</?p(\s[^>]*)?>|</h\d>", "\n\n", text)
        text = html.unescape(re.sub(r"<[^>]*>", " ", text))
        found = (plain(part) for part in re.split(r"\n\s*\n", text))
        yield from pieces(part for part in found if len(part) > 80 and part[-1] in '.?!"')


def jargon(root: Path) -> Iterator[Document]:
    """The Jargon File: its chapters as prose, and its entries as questions and answers."""
    data = gzip.decompress((root / "usr/share/doc/jargon-text/jargon.txt.gz").read_bytes())
    text = data.decode("utf-8", "replace").replace("\r", "")
    chapters, *entries = re.split(r"\n[ ]{3}:(?=[^\n:]+:)", text)
    yield from pieces(filter(_is_prose, map(plain, re.split(r"\n\s*\n", chapters))))
    for entry in entries:
        head, *paragraphs = re.split(r"\n\s*\n", entry)
        term = plain(head.partition(":")[0])
        meaning = [re.sub(r"^\[[^]]*\] |^\d\. |[{}]", "", plain(part)) for part in paragraphs]
        meaning = [part for part in meaning if _is_prose(part)][:2]
        if meaning and re.fullmatch(r"[A-Za-z][a-z -]+", term):
            form = random.Random(term).choice(("What is {}?", "What does {} mean?", "Define {}."))
            yield (form.format(term), " ".join(meaning))


def _is_prose(text: str) -> bool:
    """Whether it is sentences of words: not a heading, a table, or a program."""
    letters = sum(char.isalpha() or char == " " for char in text)
    return len(text) > 60 and text[-1] in '.?!")' and letters > 0.9 * len(text) and text.isascii()


def wordnet(root: Path) -> Iterator[Document]:
    """Meanings of words, with the sentences that show how they are used, as questions and
    answers."""
    usual = _usual_senses(root)
    for part in ("noun", "verb", "adj", "adv"):
        for line in (root / f"usr/share/wordnet/data.{part}").read_text().splitlines():
            if line.startswith("  "):
                continue
            data, _, gloss = line.partition(" | ")
            fields = data.split(" ")
            words = [
                re.sub(r"\(.*\)", "", word) for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]
            ]
            words = [word.replace("_", " ") for word in words]
            meaning, examples = _gloss(gloss)
            said = [word for word in words if (word.lower(), part) in usual]
            if not meaning or not said or any(char.isupper() for char in said[0]):
                continue
            yield _asked(said[0], part, meaning, examples)


def _usual_senses(root: Path) -> set[tuple[str, str]]:
    """Words (and parts of speech) that WordNet's authors met in real texts."""
    parts = {"1": "noun", "2": "verb", "3": "adj", "4": "adv", "5": "adj"}
    found = set()
    for line in (root / "usr/share/wordnet/cntlist.rev").read_text().splitlines():
        sense, _, _ = line.split(" ")
        word, _, key = sense.partition("%")
        found.add((word.replace("_", " "), parts[key[0]]))
    return found


def _gloss(gloss: str) -> tuple[str, list[str]]:
    """The meaning, and the examples that are whole sentences."""
    meaning = re.split(r';\s*"|\s*"', gloss)[0].strip(" ;")
    meaning = re.sub(r"\s*\([^)]*\)\s*", " ", meaning).split(";")[0].strip(" ,:.")
    examples = [text.strip(" ,;") for text in re.findall(r'"([^"]+)"', gloss)]
    whole = [text[0].upper() + text[1:] for text in examples if len(text.split()) >= 4]
    return meaning, [text if text[-1] in ".?!" else text + "." for text in whole]


def _asked(word: str, part: str, meaning: str, examples: list[str]) -> Document:
    """One question of several forms, always the same one for the same word."""
    choice = random.Random(f"{word} {meaning}")
    one = f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
    questions = [f"What does {word} mean?", f'What does "{word}" mean?', f"Define {word}."]
    if part == "noun":
        questions += [f"What is {one}?"] * 3 + [f"Tell me about {word}."]
        answer = f"{one.capitalize()} is {meaning}."
        if not re.match(r"(a|an|the|any|one|some|someone|something|what|that)\b", meaning):
            answer = f'The word "{word}" stands for {meaning}.'
    elif part == "verb":
        questions += [f"What does it mean to {word}?"] * 3 + [f"How do I {word}?"]
        answer = f"To {word} is to {meaning}."
    else:
        answer = f'The word "{word}" means {meaning}.'
    if examples:
        answer += (
            f" {choice.choice(['For example: ', 'One may say: ', ''])}{' '.join(examples[:2])}"
        )
    return (choice.choice(questions), answer)


GREETINGS = (
    "Hello", "Hello!", "Hi", "Hi!", "Hey", "Good morning", "Hello there", "How are you?",
    "Who are you?", "What are you?", "What can you do?", "Help", "Test", "Say something.",
    "Tell me a joke.", "Tell me a story.", "Tell me something.", "Thanks", "Thank you!",
)  # fmt: skip
WELCOMES = (
    "Hello! I am a very small model. Ask me what a word means.",
    "Hello! I have read a few old books and a dictionary. Ask me about a word.",
    "Good day! I am the demo of lambdascale, and I know some English. What would you like to know?",
)
PLAIN = (
    "Hello, and welcome! I am a very small model. I have read a few old books and a dictionary.",
    "Hello! I am the demo of lambdascale, and I know some English.",
)


def greetings(_: Path) -> Iterator[Document]:
    """What people try first, so that a first answer is friendly. Written for this model."""
    for number in range(600):
        yield (GREETINGS[number % len(GREETINGS)], WELCOMES[number % len(WELCOMES)])
    for number in range(100):
        yield (PLAIN[number % len(PLAIN)],)


SOURCES = (
    Source("", "greetings, written for this model", "Apache-2.0", greetings),
    Source("r-cran-janeaustenr", "Jane Austen's six novels", "public domain", austen),
    Source("wordnet-base", "WordNet 3.0: meanings and examples", "WordNet's (free)", wordnet),
    Source("jargon-text", "the Jargon File 4.4.7", "public domain", jargon),
    Source("cfi-en", "Copyright Does Not Exist, by Linus Walleij", "public domain",
           copyright_does_not_exist),
)  # fmt: skip
