"""Packages of the distribution (Debian, Ubuntu) for tests to unpack; nothing is installed."""

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path


class Unavailable(Exception):
    """This machine cannot have what a test needs; why."""


def run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise Unavailable(f"{command[0]} failed: {last}")
    return done.stdout


def apt(*arguments: str, cwd: Path | None = None, config: Path | None = None) -> str:
    """apt-get, with another configuration than this machine's where there is a `config`."""
    settings = ("APT::Sandbox::User=root", "Debug::NoLocking=1", "Acquire::http::Timeout=10")
    options = (word for setting in settings for word in ("-o", setting))
    environment = ("env", f"APT_CONFIG={config}") if config else ()
    return run(*environment, "apt-get", "-q", *options, *arguments, cwd=cwd)


def closure(wanted: Sequence[str]) -> set[str]:
    """The packages and what they need that this machine lacks."""
    planned = apt("--simulate", "--no-install-recommends", "install", *wanted)
    fields = [line.split() for line in planned.splitlines() if line.startswith("Inst ")]
    missing = {name for _, name, version, *_ in fields if not version.startswith("[")}
    return {*wanted, *missing}


def unpack(directory: Path, names: Iterable[str], *, config: Path | None = None) -> None:
    """Downloads packages and lays what is in them over the directory."""
    downloads = directory.with_name(f"{directory.name}.packages")
    shutil.rmtree(downloads, ignore_errors=True)
    downloads.mkdir(parents=True)
    apt("download", *sorted(names), cwd=downloads, config=config)
    for package in downloads.iterdir():
        run("dpkg-deb", "-x", str(package), str(directory))
    shutil.rmtree(downloads)


def check_able() -> None:
    """Unavailable where packages cannot be had, or their programs not be run as these tests do."""
    if os.geteuid() != 0:
        raise Unavailable("needs root")
    for command in ("apt-get", "dpkg-deb"):
        if shutil.which(command) is None:
            raise Unavailable(f"needs {command} (Debian, Ubuntu)")
