"""Fuzzes the headers by which clients come again: any text is a key or a place in an answer, which
is said again the same, or an ApiError of status 400.

python -m tests.fuzz.headers [-max_total_time=600] [-runs=100000] [CORPUS_DIRECTORY]
"""

import sys
from collections.abc import Callable
from functools import partial

import atheris
from multidict import CIMultiDict

with atheris.instrument_imports(include=["services.gateway"]):
    from services.gateway import idempotency
    from services.gateway.api_error import ApiError

BODY = b'{"model": "tiny"}'


def key(text: str) -> None:
    headers = CIMultiDict({idempotency.KEY: text})
    found = idempotency.key_of(headers, "/v1/completions", BODY)
    assert found is not None
    assert found == idempotency.key_of(headers, "/v1/completions", b'{ "model":"tiny"}')
    assert found.digest != getattr(idempotency.key_of(headers, "/v1/other", BODY), "digest", "")
    assert 0 <= found.seed < 1 << 63
    assert 1 <= len(text) <= idempotency.MAX_KEY
    assert text.isascii()
    assert text.isprintable()


def last_event(text: str, choices: int) -> None:
    headers = CIMultiDict({idempotency.KEY: "k", idempotency.LAST: text})
    marks = idempotency.marks_of(headers, choices)
    if marks is None:
        assert text.strip() == idempotency.END
        return
    assert len(marks) == choices
    said = ",".join(idempotency.mark(m.events, int(m.check or "0", 16)) for m in marks)
    assert said == text.strip() or not text.strip()


def run(data: bytes) -> None:
    provider = atheris.FuzzedDataProvider(data)
    choices = provider.ConsumeIntInRange(1, 4)
    text = provider.ConsumeUnicode(300)
    refused_at_most(partial(key, text))
    refused_at_most(partial(last_event, text, choices))


def refused_at_most(parse: Callable[[], None]) -> None:
    try:
        parse()
    except ApiError as error:
        if error.status != 400:
            raise


def main() -> None:
    atheris.Setup(sys.argv, run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
