"""Fetches a checkpoint from the Hugging Face Hub: what is needed of it, checked, and gone on with.

Files are laid in a directory of their own for each commit. A file that is not whole yet ends with
PART; the next call goes on behind its last byte. A file gets its name once its digest is the one
that the Hub's listing of the repository says.

The library takes the Hub's address, and who asks, from its own environment: HF_ENDPOINT, HF_TOKEN
(or what `hf auth login` has stored), HF_HUB_DOWNLOAD_TIMEOUT.
"""

import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2
from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

from services.local.hub_name import HubModel
from shared.errors import BadInput, CapacityExceeded, LambdaScaleError, NotFound
from shared.version import __version__

PART = ".part"
READ_BYTES = 1 << 20
_WANTED = re.compile(
    r"[\w.-]+\.(json|jinja|txt)|(model|adapter_model)(-[\w-]+)?\.safetensors|1_Pooling/config\.json",
    re.ASCII,
)
"""Matches the files that are fetched: weights as transformers and PEFT name them, and the small
files beside them. Other forms of the same weights are left alone."""


class HubError(LambdaScaleError):
    code = "hub"


@dataclass(frozen=True, slots=True)
class HubFile:
    name: str
    nbytes: int
    sha256: str | None
    """None for a small file, of which the Hub tells git's digest instead."""
    blob: str


@dataclass(frozen=True, slots=True)
class Listing:
    commit: str
    files: tuple[HubFile, ...]

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)


Advance = Callable[[int], None]
"""Is told of each step how many bytes have come."""


def directory(cache: Path, model: HubModel, listing: Listing) -> Path:
    return cache / model.repo.replace("/", "--") / listing.commit


def list_files(model: HubModel) -> Listing:
    """What is to be fetched. Errors: NotFound, BadInput, HubError, each with what to do."""
    with _explained(model):
        info = HfApi(library_name="lambdascale", library_version=__version__).model_info(
            model.repo, revision=model.revision, files_metadata=True
        )
    found = [
        HubFile(
            sibling.rfilename,
            sibling.size or 0,
            sibling.lfs.sha256 if sibling.lfs else None,
            sibling.blob_id or "",
        )
        for sibling in info.siblings or ()
        if _WANTED.fullmatch(sibling.rfilename)
    ]
    if not any(file.name.endswith(".safetensors") for file in found):
        raise BadInput(f"{model} has no weights as safetensors on the Hub: nothing else is read")
    return Listing(info.sha or "", tuple(found))


def missing_bytes(listing: Listing, into: Path) -> int:
    """How many bytes have still to come."""
    return sum(
        file.nbytes - _size(into / (file.name + PART))
        for file in listing.files
        if not (into / file.name).exists()
    )


def fetch(model: HubModel, listing: Listing, into: Path, advance: Advance) -> None:
    """Makes `into` hold all files of the listing. Errors: CapacityExceeded if the disk lacks room,
    HubError and those of `list_files`. What has come stays, and the next call goes on with it."""
    into.mkdir(parents=True, exist_ok=True)
    missing, room = missing_bytes(listing, into), shutil.disk_usage(into).free
    if missing > room:
        raise CapacityExceeded(
            f"{model} needs {missing / 1e9:.1f} GB more in {into}, which has room for "
            f"{room / 1e9:.1f} GB: make room, or name another directory with --cache"
        )
    for file in listing.files:
        if not (into / file.name).exists():
            _fetch_file(model, listing.commit, file, into / file.name, advance)


def _fetch_file(model: HubModel, commit: str, file: HubFile, path: Path, advance: Advance) -> None:
    part = path.with_name(path.name + PART)
    part.parent.mkdir(exist_ok=True)
    url = f"{constants.ENDPOINT}/{model.repo}/resolve/{commit}/{file.name}"
    headers = build_hf_headers(library_name="lambdascale", library_version=__version__)
    with _explained(model), part.open("ab") as target:
        http_get(
            url,
            target,
            resume_size=target.tell(),
            headers=headers | {"Accept-Encoding": "identity"},
            expected_size=file.nbytes,
            tqdm_class=_reports_to(advance),
        )
    if not _is_whole(file, part):
        part.unlink()
        raise HubError(
            f"{file.name} of {model} came with other bytes than the Hub's listing says; it was "
            "removed: run the command again, which fetches it anew"
        )
    part.rename(path)


def _is_whole(file: HubFile, path: Path) -> bool:
    """Whether the bytes have the listing's digest: SHA-256, or git's of a small file."""
    if file.sha256:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.nbytes, usedforsecurity=False)
    with path.open("rb") as source:
        while data := source.read(READ_BYTES):
            digest.update(data)
    return digest.hexdigest() == (file.sha256 or file.blob)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """The library's errors as ours, which say what to do."""
    page = f"{constants.ENDPOINT}/{model.repo}"
    log_in = "set HF_TOKEN to a token of your account" if get_token() is None else (
        "see whether HF_TOKEN (or `hf auth whoami`) is of the account that may read it"
    )  # fmt: skip
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{model} is gated: ask for access at {page}, and {log_in}; then run this again"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"the Hub has no model {model.repo} that you may see: check the name; if the model is "
            f"private, {log_in}"
        ) from error
    except RevisionNotFoundError as error:
        raise NotFound(f"{model.repo} has no revision {model.revision}: see {page}") from error
    except HFValidationError as error:
        raise BadInput(f"{model}: no name of a model on the Hub: {error}") from error
    except OfflineModeIsEnabled as error:
        raise HubError("HF_HUB_OFFLINE is set: unset it to fetch models") from error
    except HfHubHTTPError as error:
        raise HubError(
            f"{constants.ENDPOINT} answered {error.response.status_code} for {model}: run the "
            "command again later; what has come is kept"
        ) from error
    except (httpx2.HTTPError, OSError) as error:
        raise HubError(
            f"{constants.ENDPOINT} cannot be reached, or broke off ({error}): run the command "
            "again, which goes on with what has come; HF_ENDPOINT names another address"
        ) from error


def _reports_to(advance: Advance) -> Any:
    """A bar, as the library wants it, that draws nothing and tells of each piece."""

    class Bar:
        def __init__(self, **_: Any) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(
            self,
            kind: type[BaseException] | None,
            error: BaseException | None,
            trace: TracebackType | None,
        ) -> None: ...

        def update(self, nbytes: int) -> None:
            advance(nbytes)

    return Bar
