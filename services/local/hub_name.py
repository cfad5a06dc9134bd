"""The name of a model on the Hugging Face Hub, as it is written on the command line."""

import re
from dataclasses import dataclass

from shared.errors import BadInput

PREFIX = "hf:"
_NAME = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+|[\w.-]+)(@(?P<revision>[\w./-]+))?", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubModel:
    repo: str
    """OWNER/NAME"""
    revision: str | None = None
    """A branch, a tag or a commit; None: the main branch."""

    @property
    def name(self) -> str:
        return self.repo.rpartition("/")[2]

    def __str__(self) -> str:
        return self.repo + (f"@{self.revision}" if self.revision else "")


def parse(text: str) -> HubModel:
    """hf:OWNER/NAME[@REVISION]"""
    found = _NAME.fullmatch(text.removeprefix(PREFIX))
    if found is None:
        raise BadInput(f"{text}: write a model of the Hub as {PREFIX}OWNER/NAME[@REVISION]")
    return HubModel(found["repo"], found["revision"])
