"""A checkpoint on the command line: a directory, or a model of the Hub, which is fetched first."""

import argparse
import os
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from services.cli.client import absolute, say
from services.local.hub_name import PREFIX, parse

FORMS = f"PATH|{PREFIX}OWNER/NAME"
WHERE = (
    "directory in which models of the Hub are kept, and gone on with where a fetch broke off "
    "(default: lambdascale/hub in $XDG_CACHE_HOME or ~/.cache)"
)


def add_cache_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cache", type=absolute, metavar="DIR", help=WHERE)


def is_on_hub(text: str) -> bool:
    return text.startswith(PREFIX)


def local(text: str, cache: Path | None) -> Path:
    """The directory of the checkpoint that the words name, on this machine."""
    return _fetched(text, cache or _default()) if is_on_hub(text) else absolute(text)


def name_of(text: str) -> str:
    """What the model is called unless the user says."""
    path = Path(text.partition("@")[0]) if is_on_hub(text) else absolute(text)
    return path.name.removeprefix(PREFIX)


def _default() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches) if caches else Path.home() / ".cache") / "lambdascale" / "hub"


def _fetched(text: str, cache: Path) -> Path:
    from services.local import hub  # imports huggingface_hub: half a second

    model = parse(text)
    listing = hub.list_files(model)
    into = hub.directory(cache, model, listing)
    missing = hub.missing_bytes(listing, into)
    if not missing:
        say(f"{model} is in {into}")
        return into
    rest = f"{missing / 1e6:.1f} of " if missing < listing.nbytes else ""
    say(f"fetching {model}: {rest}{listing.nbytes / 1e6:.1f} MB, to {into}")
    columns = (TextColumn(model.name), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=listing.nbytes, completed=listing.nbytes - missing)
        hub.fetch(model, listing, into, lambda nbytes: progress.advance(task, nbytes))
    say(f"fetched {model}, and checked it")
    return into
