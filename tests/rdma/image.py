"""What a virtual machine with Soft-RoCE boots: a kernel, its first file system, an emulator.

Taken from the packages of the distribution (Debian, Ubuntu) and unpacked into a folder, once;
nothing is installed. The guest's root is this machine's own (see `init`), with the libraries that
RDMA programs need laid over it.
"""

import fcntl
import hashlib
import lzma
import os
import platform
import shutil
import stat
import struct
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.packages import Unavailable, apt, check_able, closure, unpack

INIT = Path(__file__).with_name("init")
PACKAGES = Path(__file__).parents[1] / "support" / "packages.py"
KERNELS = ("linux-image-amd64", "linux-image-generic")
"""Metapackages of kernels that have rdma_rxe and 9p (those for clouds do not): Debian, Ubuntu."""
MODULES = (
    *("virtio_pci", "virtio_rng", "veth"),
    *("9pnet_virtio", "9p", "overlay"),
    *("crc32_generic", "rdma_rxe", "rdma_ucm"),
)
GUEST_PACKAGES = ("python3-pyverbs", "ibverbs-providers", "iproute2")
LEFT_OUT = {"rdma-core", "systemd", "udev"}
"""Services that those packages ask for and a guest without any can do without."""


@dataclass(frozen=True, slots=True)
class Image:
    directory: Path

    @property
    def kernel(self) -> Path:
        return self.directory / "kernel"

    @property
    def initramfs(self) -> Path:
        return self.directory / "initramfs"

    @property
    def emulator(self) -> Path:
        """Root of what QEMU consists of."""
        return self.directory / "emulator"

    @property
    def overlay(self) -> Path:
        """What the guest has and this machine need not."""
        return self.directory / "overlay"


def prepare() -> Image:
    """The image of this version of the harness: made now if it is not there yet (15 s)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Unavailable("needs Linux on x86-64")
    check_able()  # root: the guest runs on this machine's files, read-only
    if shutil.which("bash") is None:
        raise Unavailable("needs bash")
    made_of = (Path(__file__), PACKAGES, INIT, Path("/etc/os-release"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in made_of)).hexdigest()
    image = Image(_cache() / digest[:12])
    image.directory.parent.mkdir(parents=True, exist_ok=True)
    with (image.directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not image.directory.exists():
            making = Image(image.directory.parent / "unfinished")
            shutil.rmtree(making.directory, ignore_errors=True)
            _make(making)
            making.directory.rename(image.directory)
    _check_interpreter(image)
    return image


def _cache() -> Path:
    if chosen := os.environ.get("LS_RDMA_VM"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "lambdascale" / "rdma-vm"


def _make(image: Image) -> None:
    kernel = image.directory / "unpacked-kernel"
    apt("update")
    guest = closure(GUEST_PACKAGES) - LEFT_OUT
    groups = {
        image.emulator: closure(["qemu-system-x86"]),
        image.overlay: guest,
        kernel: {"busybox-static", *_kernel_packages()},
    }
    for root, names in groups.items():
        unpack(root, names)
    _merge_usr(image.overlay)
    compressed = next((kernel / "boot").glob("vmlinuz-*"))
    image.kernel.write_bytes(_decompressed(compressed.read_bytes()))
    tree = next((kernel / "lib/modules").iterdir())
    busybox = next(kernel.glob("**/bin/busybox"))
    image.initramfs.write_bytes(_initramfs(busybox, _modules(tree)))
    shutil.rmtree(kernel)


def _check_interpreter(image: Image) -> None:
    """Debian builds pyverbs for its own version of Python alone."""
    suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
    folder = image.overlay / "usr/lib/python3/dist-packages/pyverbs"
    if not (folder / f"device{suffix}").exists():
        raise Unavailable(f"the distribution's python3-pyverbs is not for this Python ({suffix})")


# --- packages ------------------------------------------------------------------


def _kernel_packages() -> set[str]:
    for name in KERNELS:
        found = subprocess.run(
            ["apt-cache", "depends", name], capture_output=True, text=True, check=False
        ).stdout.split()
        packages = {word for word in found if word.startswith(("linux-image-", "linux-modules-"))}
        if packages - {name}:
            return packages - {name}
    raise Unavailable(f"apt knows no kernel package: {' or '.join(KERNELS)}")


def _merge_usr(root: Path) -> None:
    """/lib, /bin and /sbin are links into /usr, which a directory here would hide."""
    for name in ("lib", "lib64", "bin", "sbin"):
        if (root / name).is_dir():
            shutil.copytree(root / name, root / "usr" / name, symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(root / name)


# --- kernel and modules ----------------------------------------------------------


def _decompressed(kernel: bytes) -> bytes:
    """The ELF file within a bzImage: an emulated CPU takes long to decompress it.

    Only xz is known (Debian); any other kernel stays as it is, which boots too.
    """
    start = (kernel[0x1F1] + 1) * 512 + struct.unpack_from("<I", kernel, 0x248)[0]
    if kernel[start : start + 6] != b"\xfd7zXZ\0":
        return kernel
    return lzma.LZMADecompressor().decompress(kernel[start:])


def _modules(tree: Path) -> list[tuple[str, bytes]]:
    """MODULES and what they need, in the order to load them. What is built in is left out."""
    paths = {_module_name(path): path for path in tree.glob("kernel/**/*.ko*")}
    built_in = {
        _module_name(Path(line)) for line in (tree / "modules.builtin").read_text().splitlines()
    }
    loaded: dict[str, bytes] = {}

    def load(name: str) -> None:
        if name in loaded or name in built_in:
            return
        if name not in paths:
            raise Unavailable(f"the kernel {tree.name} has no module {name}")
        code = _module_code(paths[name])
        for field in code[code.index(b"\0depends=") + 1 :].split(b"\0", 1)[0][8:].split(b","):
            if field:
                load(field.decode().replace("-", "_"))
        loaded[name] = code

    for name in MODULES:
        load(name)
    return list(loaded.items())


def _module_name(path: Path) -> str:
    return path.name.partition(".ko")[0].replace("-", "_")


def _module_code(path: Path) -> bytes:
    if path.suffix == ".xz":
        return lzma.decompress(path.read_bytes())
    if path.suffix == ".zst":
        return subprocess.run(["zstd", "-dcq", path], capture_output=True, check=True).stdout
    return path.read_bytes()


def _initramfs(busybox: Path, modules: Sequence[tuple[str, bytes]]) -> bytes:
    """A cpio archive in the `newc` format."""
    files: list[tuple[str, int, bytes]] = [
        *((name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "dev", "mnt", "proc", "sys")),
        ("modules", stat.S_IFDIR | 0o755, b""),
        ("bin/busybox", stat.S_IFREG | 0o755, busybox.read_bytes()),
        ("init", stat.S_IFREG | 0o755, INIT.read_bytes()),
        *(
            (f"modules/{index:02}-{name}.ko", stat.S_IFREG | 0o644, code)
            for index, (name, code) in enumerate(modules)
        ),
        ("dev/console", stat.S_IFCHR | 0o600, b""),
        ("TRAILER!!!", 0, b""),
    ]
    return b"".join(
        piece
        for inode, (name, mode, data) in enumerate(files, 1)
        for piece in _cpio_entry(inode, name.encode() + b"\0", mode, data)
    )


def _cpio_entry(inode: int, name: bytes, mode: int, data: bytes) -> Iterator[bytes]:
    device = (5, 1) if stat.S_ISCHR(mode) else (0, 0)
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(name), 0)
    header = b"070701" + b"".join(b"%08x" % field for field in fields) + name
    yield header + bytes(-len(header) % 4)
    yield data + bytes(-len(data) % 4)
