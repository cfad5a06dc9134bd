"""The image is the same, whoever builds it and when, but for the times of its files."""

import hashlib
import subprocess
import tarfile

import pytest

from tests.containers import images
from tests.containers.engine import Engine
from tests.containers.images import ROOT

pytestmark = pytest.mark.timeout(3600)
Files = dict[str, tuple[object, ...]]


def files_of(engine: Engine, image: str) -> Files:
    """By path: kind, mode, owner, where a link leads, and the digest of what a file holds."""
    container = engine.docker("create", image).strip()
    export = ["docker", "export", container]
    found: Files = {}
    with subprocess.Popen(export, stdout=subprocess.PIPE, env=engine.environment) as process:
        assert process.stdout is not None
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for each in archive:
                file = archive.extractfile(each) if each.isfile() else None
                digest = hashlib.sha256(file.read()).hexdigest() if file else ""
                about = (each.type, each.mode, each.uid, each.gid, each.linkname)
                found[each.name] = (*about, digest)
    assert process.returncode == 0
    engine.docker("rm", container)
    return found


def test_two_builds_have_the_same_files(engine: Engine) -> None:
    engine.start(connected=True)
    images.python(engine, images.base())
    built: list[Files] = []
    for tag in ("lambdascale:once", "lambdascale:again"):
        engine.docker(
            *("build", "--quiet", "--no-cache", "--network", "host", "--tag", tag, str(ROOT))
        )
        built.append(files_of(engine, tag))
    once, again = built
    differ = [path for path in once.keys() | again.keys() if once.get(path) != again.get(path)]
    assert sorted(differ) == []
    engine.docker("image", "rm", "lambdascale:once", "lambdascale:again")
    engine.stop()
