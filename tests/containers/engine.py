"""A Docker engine of the tests' own: unpacked from packages, run in namespaces of its own.

Engine and Compose are those of Debian 13; what they need of the system (runc, iptables) is the
distribution's, which Debian 12 needs for runc. Nothing is installed, and neither an engine nor a
network of this machine is touched.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.packages import Unavailable, apt, check_able, closure, run, unpack

DOCKER = ("docker.io", "docker-cli", "containerd", "docker-compose", "docker-buildx", "tini")
TOOLS = ("runc", "iptables", "mmdebstrap")
LIBRARIES = f"usr/lib/{os.uname().machine}-linux-gnu"
START_S = 60.0
STOP_S = 30.0
POLL_S = 0.1
NAMESPACE = Path(__file__).with_name("namespace")
"""What the engine starts in."""


def mirror() -> str:
    """Debian's, as this machine's apt has it."""
    sites = run("apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages")
    for site in sites.splitlines():
        if site.endswith("/debian"):
            return site
    raise Unavailable("apt has no mirror of Debian")


@dataclass(slots=True)
class Engine:
    directory: Path
    """Holds the programs, what they keep, and their logs."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None)

    @property
    def programs(self) -> Path:
        return self.directory / "programs"

    @property
    def environment(self) -> dict[str, str]:
        found = [str(self.programs / place) for place in ("usr/sbin", "usr/bin", "sbin", "bin")]
        return {
            **os.environ,
            "DOCKER_HOST": f"unix://{self.directory}/docker.sock",
            "DOCKER_CONFIG": str(self.directory / "config"),
            "PATH": os.pathsep.join([*found, os.environ["PATH"]]),
            "LD_LIBRARY_PATH": str(self.programs / LIBRARIES),
            "XTABLES_LIBDIR": str(self.programs / LIBRARIES / "xtables"),
        }

    def prepare(self) -> None:
        """Unpacks the programs, unless they are there. Unavailable says what cannot be had."""
        check_able()
        if not Path("/sys/fs/cgroup/memory").is_dir():
            raise Unavailable("needs control groups of version 1: with others this is untested")
        for command in ("unshare", "nsenter", "ip"):
            if shutil.which(command) is None:
                raise Unavailable(f"needs {command}")
        if self.programs.exists():
            return
        making = self.directory / "unfinished"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir(parents=True)
        apt("update")
        unpack(making, closure(TOOLS))
        unpack(making, DOCKER, config=self._debian_13())
        for name in ("iptables", "ip6tables"):  # which the package's scripts would link
            (making / "usr/sbin" / name).unlink(missing_ok=True)
            (making / "usr/sbin" / name).symlink_to("xtables-nft-multi")
        (making / "usr/bin/docker-compose").unlink(missing_ok=True)
        plugins = self.directory / "config" / "cli-plugins"
        shutil.copytree(making / "usr/libexec/docker/cli-plugins", plugins, dirs_exist_ok=True)
        making.rename(self.programs)

    def _debian_13(self) -> Path:
        """A configuration of apt that knows Debian 13 alone, with its lists."""
        folder = self.directory / "apt"
        for part in ("lists/partial", "cache/archives/partial"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / "status").touch()
        (folder / "sources").write_text(f"deb {mirror()} trixie main\n")
        settings = {
            "Dir::Etc::sourcelist": folder / "sources",
            "Dir::Etc::sourceparts": "-",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "status",
            "Dir::Cache": folder / "cache",
        }
        config = folder / "config"
        config.write_text("".join(f'{key} "{value}";\n' for key, value in settings.items()))
        apt("update", config=config)
        return config

    # --- the daemon ---

    def start(self, *, connected: bool) -> None:
        """`connected`: in this machine's network, to build; else in one of its own, to run."""
        (self.directory / "docker.pid").unlink(missing_ok=True)
        unshare = ["unshare", "--mount", "--cgroup", "--propagation", "private"]
        flags = ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--ip-masq=false"]
        with (self.directory / "dockerd.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *unshare,
                    *([] if connected else ["--net"]),
                    *("bash", str(NAMESPACE), str(self.directory)),
                    *([*flags, "--bridge=none"] if connected else []),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while self.asks("version").returncode:
            if self._process.poll() is not None or time.monotonic() > deadline:
                last = (self.directory / "dockerd.log").read_text().strip().splitlines()[-1:]
                self.stop()
                raise Unavailable(f"dockerd does not start here: {''.join(last)}")
            time.sleep(POLL_S)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        _remove_groups()

    def asks(self, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        return self._run(["docker", *arguments], self.environment | variables)

    def docker(self, *arguments: str, **variables: str) -> str:
        """Its output; what it says in an AssertionError if it fails. `variables`: of its
        environment."""
        done = self.asks(*arguments, **variables)
        assert done.returncode == 0, f"docker {' '.join(arguments)}:\n{done.stderr[-3000:]}"
        return done.stdout

    def fetch(self, code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Runs Python code of this machine in the engine's network, where ports are published."""
        assert self._process is not None
        enter = ["nsenter", "--target", str(self._process.pid), "--net"]
        return self._run([*enter, sys.executable, "-c", code, *arguments], os.environ)

    def _run(
        self, command: Sequence[str], environment: Mapping[str, str]
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def _remove_groups() -> None:
    """The engine's control groups, which are the machine's and outlive it."""
    for group in Path("/sys/fs/cgroup").glob("*/docker"):
        for folder, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):  # one of an engine of this machine, with containers
                Path(folder).rmdir()
