"""The images that the Dockerfile and the Compose file name, made without a registry.

Debian's own Python stands in for python:slim, and the collector of this folder for Jaeger. The real
ones are not tested.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.containers.engine import Engine, mirror

ROOT = Path(__file__).parents[2]
PYTHON = """\
FROM debian-python
COPY ca.crt /etc/ssl/certs/ca-certificates.crt
COPY pip.conf /etc/pip.conf
COPY wheels /usr/local/wheels
RUN for name in python python3 python3.11; do ln -s /usr/bin/python3.11 /usr/local/bin/$name; done
ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8
"""
PIP = """\
[global]
cert = /etc/ssl/certs/ca-certificates.crt
find-links = /usr/local/wheels
timeout = 180
"""
COLLECTOR = """\
FROM {image}
COPY collector.py /collector.py
ENTRYPOINT ["python", "/collector.py"]
CMD []
"""


def base() -> str:
    """The name of the image that ours is built on."""
    (name,) = re.findall("(?m)^ARG BASE=(.*)$", (ROOT / "Dockerfile").read_text())
    return str(name)


def _context(engine: Engine, name: str, dockerfile: str) -> Path:
    context = engine.directory / "contexts" / name
    shutil.rmtree(context, ignore_errors=True)
    context.mkdir(parents=True)
    (context / "Dockerfile").write_text(dockerfile)
    return context


def _build(engine: Engine, tag: str, context: Path) -> None:
    engine.docker("build", "--quiet", "--network", "none", "--tag", tag, str(context))


def _is_there(engine: Engine, tag: str) -> bool:
    return engine.asks("image", "inspect", tag).returncode == 0


def python(engine: Engine, tag: str) -> None:
    if _is_there(engine, tag):
        return
    tree = engine.directory / "python.tar"
    subprocess.run(
        ["mmdebstrap", "--quiet", "--variant=minbase", "--include=python3-venv,ca-certificates",
         "bookworm", str(tree), f"deb {mirror()} bookworm main"],
        env=engine.environment | {"LD_LIBRARY_PATH": ""},
        check=True,
    )  # fmt: skip
    engine.docker("import", str(tree), "debian-python")
    tree.unlink()
    context = _context(engine, "python", PYTHON)
    (context / "pip.conf").write_text(PIP)
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", context / "ca.crt")
    (context / "wheels").mkdir()
    for wheel in _kept_wheels():
        shutil.copy(wheel, context / "wheels")
    _build(engine, tag, context)


def _kept_wheels() -> list[Path]:
    """torch's, where this machine's pip has it in a folder of its own."""
    asked = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.split()
    return [wheel for folder in found for wheel in Path(folder).glob("torch-*.whl")]


def collector(engine: Engine, tag: str, image: str) -> None:
    context = _context(engine, "collector", COLLECTOR.format(image=image))
    shutil.copy(Path(__file__).with_name("collector.py"), context)
    _build(engine, tag, context)
