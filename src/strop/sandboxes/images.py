"""Root file systems: a view of the host, a folder, a tar archive. Kept in a cache by what they contain.

OCI images and Dockerfiles build on this in `oci.py` and `dockerfile.py`. An image is folders of the host: layers that
overlayfs stacks, topmost first, and single folders bound read-only on top.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from strop.errors import ConfigError

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: What a command sees if nobody says otherwise. HOME follows the user.
DEFAULT_ENV: Mapping[str, str] = {"PATH": DEFAULT_PATH, "LANG": "C.UTF-8"}

#: Configuration of the host that programs need and that says nothing about it or its users.
_HOST_ETC = (
    "alternatives", "ca-certificates.conf", "debconf.conf", "debian_version", "default/useradd", "deluser.conf", "adduser.conf",
    "fonts", "java-11-openjdk", "java-17-openjdk", "java-21-openjdk", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "login.defs",
    "mime.types", "os-release", "pam.conf", "pam.d", "perl", "profile", "protocols", "python3", "python3.11", "python3.12",
    "python3.13", "rpc", "security", "services", "shells", "skel", "ssl/certs", "ssl/openssl.cnf", "pki", "crypto-policies",
)  # fmt: skip
_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
_GROUP = "root:x:0:\ntty:x:5:\nusers:x:100:\nnogroup:x:65534:\n"
_FILES = {
    "etc/passwd": _PASSWD,
    "etc/group": _GROUP,
    "etc/shadow": "root:*:19000:0:99999:7:::\nnobody:*:19000:0:99999:7:::\n",
    "etc/gshadow": "root:*::\ntty:*::\nusers:*::\nnogroup:*::\n",
    "etc/hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "etc/hostname": "sandbox\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n",
    "etc/resolv.conf": "",
}
_FOLDERS = (
    "dev",
    "proc",
    "sys",
    "tmp",
    "var/tmp",
    "root",
    "home",
    "run",
    "var/lib",
    "var/cache",
    "var/log",
    "opt",
    "mnt",
    "usr",
)


def cache_folder() -> Path:
    """Where unpacked images are kept: $STROP_CACHE, else under $XDG_CACHE_HOME or ~/.cache."""
    given = os.environ.get("STROP_CACHE")
    base = Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "strop"
    return base / "images"


def cached(key: str, build: Callable[[Path], None]) -> Path:
    """The folder for `key`, built beside and renamed into place if it is not there yet."""
    place = cache_folder() / key
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f".{key[:20]}-", dir=place.parent))
    try:
        beside.chmod(0o755)
        build(beside)
        beside.rename(place)
    except OSError:
        if not place.is_dir():  # another process may have been faster
            raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return place


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """A root file system and how commands run in it by default.

    Attributes:
        layers: folders of the host, topmost first; their files keep owners 0 to 65,535.
        binds: (folder or file of the host, absolute path inside), visible read-only.
        env: variables of every command.
        cwd: where commands start.
        user: who runs them; None is root.
    """

    layers: tuple[Path, ...]
    binds: tuple[tuple[Path, str], ...] = ()
    env: Mapping[str, str] = field(default_factory=lambda: dict(DEFAULT_ENV))
    cwd: str = "/"
    user: str | None = None

    @staticmethod
    def host(allow: Sequence[str] = ("/usr",), *, etc: Sequence[str] = _HOST_ETC) -> Image:
        """The host's own programs, read-only: the folders of `allow` and nothing else, with an /etc made for it.

        Args:
            allow: folders of the host, absolute, that a sandbox may read.
            etc: files and folders below the host's /etc that are copied; names that don't exist are left out.

        Raises:
            ConfigError: an entry that would open the whole host, or that is not there.
        """
        for path in allow:
            if not path.startswith("/") or PurePosixPath(path) == PurePosixPath("/") or ".." in path:
                raise ConfigError("image.allow", f"{path!r} can't be allowed", "An absolute folder below /")
            if not Path(path).exists():
                raise ConfigError("image.allow", f"{path!r} does not exist", "A folder of this machine")
        links = _root_links(allow)
        described = "\n".join(
            [*sorted(allow), *sorted(etc), *map(repr, links.items()), repr(_etc_state(etc)), repr(_FILES)]
        )
        key = "host-" + hashlib.sha256(described.encode()).hexdigest()[:32]
        skeleton = cached(key, lambda folder: _build_skeleton(folder, allow, etc, links))
        return Image(layers=(skeleton,), binds=tuple((Path(path), path) for path in allow))

    @staticmethod
    def from_folder(path: str | os.PathLike[str]) -> Image:
        """A folder that holds a root file system. It is never written to, and must not change while in use.

        Raises:
            ConfigError: not a folder.
        """
        folder = Path(path).absolute()
        if not folder.is_dir():
            raise ConfigError(
                "image", f"{str(path)!r} is not a folder", "A root file system, or Image.from_tar for an archive"
            )
        if all((folder / name).is_dir() for name in ("dev", "proc")):
            return Image(layers=(folder,))
        return Image(layers=(folder, mount_points()))

    @staticmethod
    def from_tar(path: str | os.PathLike[str]) -> Image:
        """A tar archive (compressed or not) of a root file system, unpacked once.

        Raises:
            ConfigError: not a readable archive, or one with members outside of it.
        """
        digest = hashlib.sha256()
        with Path(path).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)

        def unpack(folder: Path) -> None:
            try:
                with tarfile.open(path) as archive:
                    unpack_root(archive, folder)
            except tarfile.TarError as error:
                raise ConfigError(
                    "image", f"{str(path)!r} can't be unpacked: {error}", "A tar archive of a root file system"
                ) from None

        return Image.from_folder(cached("tar-" + digest.hexdigest()[:32], unpack))

    @staticmethod
    def from_oci(path: str | os.PathLike[str], tag: str | None = None) -> Image:
        """An OCI image layout on disk (a folder, or an archive of one); see `oci.from_layout`."""
        from strop.sandboxes.oci import from_layout

        return from_layout(path, tag)

    @staticmethod
    def from_registry(reference: str) -> Image:
        """An image of a registry, for example "docker.io/library/python:3.12-slim"; see `oci.from_registry`."""
        from strop.sandboxes.oci import from_registry

        return from_registry(reference)

    def with_env(self, env: Mapping[str, str]) -> Image:
        """The same with more variables."""
        return replace(self, env={**self.env, **env})


def mount_points() -> Path:
    """A lowest layer that gives every image the folders that are mounted on."""

    def build(folder: Path) -> None:
        for name in ("dev", "proc", "sys", "tmp"):
            (folder / name).mkdir()
        (folder / "tmp").chmod(0o1777)

    return cached("mount-points", build)


def unpack_root(archive: tarfile.TarFile, folder: Path, members: Iterable[tarfile.TarInfo] | None = None) -> None:
    """Unpack a root file system: owners kept if we may, device nodes left out, nothing outside `folder`.

    Args:
        archive: the archive.
        folder: where to.
        members: which; all if None.

    Raises:
        tarfile.TarError: a member that leaves the folder.
    """
    for member in archive if members is None else members:
        if member.ischr() or member.isblk():
            continue
        name = PurePosixPath("/" + member.name)
        if ".." in name.parts:
            raise tarfile.TarError(f"member {member.name!r} leaves the archive")
        place = resolve_parent(folder, name)
        if member.isdir():
            if place.is_symlink() or not place.is_dir():
                place.unlink(missing_ok=True)
                place.mkdir()
        elif place.is_symlink() or place.exists():
            shutil.rmtree(place) if place.is_dir() and not place.is_symlink() else place.unlink()
        if member.issym():
            place.symlink_to(member.linkname)
        elif member.islnk():
            os.link(resolve_parent(folder, PurePosixPath("/" + member.linkname)), place, follow_symlinks=False)
            continue
        elif member.isfifo():
            os.mkfifo(place)
        elif member.isreg():
            source = archive.extractfile(member)
            with place.open("wb") as target:
                if source is not None:
                    shutil.copyfileobj(source, target, 1 << 20)
        if os.geteuid() == 0:
            os.chown(place, member.uid, member.gid, follow_symlinks=False)
        if not member.issym():
            place.chmod(member.mode & 0o7777)
            os.utime(place, (member.mtime, member.mtime))


def resolve_parent(root: Path, name: PurePosixPath) -> Path:
    """Where `name` lies below `root`, with links above its last part followed inside `root` and folders made.

    An archive may hold a link out of its root and then a member behind that link; here links restart at `root`.
    """
    parts, place, hops = list(name.parts[1:-1]), root, 0
    while parts:
        part = parts.pop(0)
        if part == "..":
            place = place.parent if place != root else root
            continue
        step = place / part
        if step.is_symlink():
            hops += 1
            if hops > 40:
                raise tarfile.TarError(f"too many links on the way to {str(name)!r}")
            target = PurePosixPath(step.readlink())
            if target.is_absolute():
                place = root
            parts = [part for part in target.parts if part != "/"] + parts
            continue
        if not step.is_dir():
            step.unlink(missing_ok=True)
            step.mkdir()
        place = step
    return place / name.name if name.name else root


def _root_links(allow: Sequence[str]) -> dict[str, str]:
    """Links of the host's root (bin -> usr/bin) that lead into what is allowed."""
    links = {}
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink() and any(("/" + str(path.readlink()).lstrip("/")).startswith(folder) for folder in allow):
            links[name] = str(path.readlink())
    return links


def _etc_state(names: Sequence[str]) -> list[tuple[str, int]]:
    """What the copied part of /etc depends on: names and times of change."""
    found = []
    for name in names:
        path = Path("/etc") / name
        if path.exists():
            found.append((name, path.stat().st_mtime_ns))
    return found


def _build_skeleton(folder: Path, allow: Sequence[str], etc: Sequence[str], links: Mapping[str, str]) -> None:
    for name in _FOLDERS:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in ("tmp", "var/tmp"):
        (folder / name).chmod(0o1777)
    (folder / "root").chmod(0o700)
    for name, target in links.items():
        (folder / name).symlink_to(target)
    for path in allow:
        place = folder / path.lstrip("/")
        if Path(path).is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.touch()
    (folder / "etc").mkdir(exist_ok=True)
    for name in etc:
        _copy_if_there(Path("/etc") / name, folder / "etc" / name)
    for name, text in _FILES.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o640 if "shadow" in name else 0o644)


def _copy_if_there(source: Path, target: Path) -> None:
    """Copy what there is and what this user may read: the rest is nothing for a sandbox either."""
    if not os.access(source, os.R_OK):
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=_unreadable, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)


def _unreadable(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not os.access(Path(folder, name), os.R_OK)]
