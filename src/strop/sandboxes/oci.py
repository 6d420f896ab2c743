"""OCI images as root file systems: from an image layout on disk, an archive of one, or a registry.

Blobs are checked against their digests and kept, unpacked, by the digest of their content; layers stay apart, so that
images share them and overlayfs stacks them. Whiteouts become overlayfs's own.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import platform
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Protocol

import httpx

from strop.errors import ConfigError
from strop.sandboxes.images import DEFAULT_ENV, Image, cache_folder, cached, mount_points, resolve_parent, unpack_root

_INDEX = {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
_MANIFEST = {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
#: Largest manifest or configuration; layers have no bound but the disk.
_MAX_DOCUMENT = 8 << 20


Kind = Literal["manifests", "blobs"]


class Blobs(Protocol):
    """Where the parts of an image come from."""

    def document(self, reference: str, kind: Kind = "manifests") -> dict[str, Any]:
        """A manifest or index (or, of kind "blobs", a configuration) by digest; for "" where everything begins."""
        ...

    def open(self, digest: str) -> IO[bytes]:
        """A layer's bytes, not yet checked."""
        ...


def _checked(data: bytes, digest: str) -> bytes:
    if hashlib.sha256(data).hexdigest() != digest.removeprefix("sha256:"):
        raise ConfigError("image", f"blob {digest} holds something else", "An image whose blobs match their digests")
    return data


def _is_digest(digest: Any) -> str:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError("image", f"{digest!r} is no digest", "sha256: and 64 hexadecimal digits")
    return digest


class Layout:
    """An OCI image layout: a folder with index.json and blobs/."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        if not (folder / "index.json").is_file():
            raise ConfigError("image", f"{str(folder)!r} has no index.json", "A folder in the OCI image layout")

    def document(self, reference: str, kind: Kind = "manifests") -> dict[str, Any]:
        if not reference:
            return _parsed((self._folder / "index.json").read_bytes(), "index.json")
        return _parsed(_checked(self._blob(reference).read_bytes(), reference), reference)

    def open(self, digest: str) -> IO[bytes]:
        return self._blob(digest).open("rb")

    def _blob(self, digest: str) -> Path:
        path = self._folder / "blobs" / "sha256" / _is_digest(digest).removeprefix("sha256:")
        if not path.is_file():
            raise ConfigError("image", f"blob {digest} is missing", "A complete image layout")
        return path


class Registry:
    """An image in a registry that speaks the OCI distribution protocol, with anonymous or given credentials.

    Args:
        reference: "registry/repository:tag" or "…@sha256:…"; a name without a registry is Docker Hub's.
        transport: another way to carry HTTP, for tests.
        credentials: user and password.
    """

    def __init__(
        self,
        reference: str,
        *,
        transport: httpx.BaseTransport | None = None,
        credentials: tuple[str, str] | None = None,
    ) -> None:
        self.host, self.repository, self.version = split_reference(reference)
        scheme = "http" if self.host.split(":")[0] in ("localhost", "127.0.0.1") else "https"
        self._http = httpx.Client(
            base_url=f"{scheme}://{self.host}", transport=transport, follow_redirects=True, timeout=60.0
        )
        self._credentials, self._token = credentials, ""

    def document(self, reference: str, kind: Kind = "manifests") -> dict[str, Any]:
        response = self._get(kind, reference or self.version)
        if response.status_code != 200:
            raise ConfigError(
                "image", f"{self.host}/{self.repository} has no {reference or self.version!r}", "An image that exists"
            )
        data = response.content
        if len(data) > _MAX_DOCUMENT:
            raise ConfigError("image", "a manifest is too large", f"At most {_MAX_DOCUMENT} bytes")
        digest = reference or self.version
        return _parsed(_checked(data, digest) if _DIGEST.fullmatch(digest) else data, digest)

    def open(self, digest: str) -> IO[bytes]:
        file = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
        url = f"/v2/{self.repository}/blobs/{_is_digest(digest)}"
        with self._http.stream("GET", url, headers=self._headers()) as response:
            if response.status_code != 200:
                raise ConfigError(
                    "image", f"blob {digest} could not be had: status {response.status_code}", "A complete image"
                )
            for piece in response.iter_bytes():
                file.write(piece)
        file.seek(0)
        return file

    def _headers(self) -> dict[str, str]:
        accept = {"Accept": ", ".join(sorted(_INDEX | _MANIFEST))}
        return {**accept, "Authorization": f"Bearer {self._token}"} if self._token else accept

    def _get(self, kind: str, reference: str) -> httpx.Response:
        url = f"/v2/{self.repository}/{kind}/{reference}"
        try:
            response = self._http.get(url, headers=self._headers())
            if response.status_code == 401 and not self._token:
                self._token = self._fetch_token(response.headers.get("www-authenticate", ""))
                response = self._http.get(url, headers=self._headers())
        except httpx.HTTPError as error:
            raise ConfigError(
                "image", f"registry {self.host} could not be reached: {error}", "A reachable registry"
            ) from None
        return response

    def _fetch_token(self, challenge: str) -> str:
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        if not challenge.lower().startswith("bearer") or "realm" not in fields:
            raise ConfigError("image", f"{self.host} wants {challenge!r}", "A registry with bearer tokens")
        query = {
            "service": fields.get("service", ""),
            "scope": fields.get("scope", f"repository:{self.repository}:pull"),
        }
        answer = self._http.get(fields["realm"], params=query, auth=self._credentials)
        body = answer.json() if answer.status_code == 200 else {}
        return str(body.get("token") or body.get("access_token") or "")


def split_reference(reference: str) -> tuple[str, str, str]:
    """(registry, repository, tag or digest) of an image reference, with Docker's defaults."""
    name, at, digest = reference.partition("@")
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost"):
        first, rest = "registry-1.docker.io", name if slash else f"library/{name}"
    head, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:
        head, tag = rest, "latest"
    if not re.fullmatch(r"[a-z0-9._/-]+", head):
        raise ConfigError("image", f"{reference!r} is no image reference", '"registry/repository:tag"')
    return first, head, digest if at else tag


def _parsed(data: bytes, what: str) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ConfigError("image", f"{what} is no JSON: {error}", "An OCI image") from None
    if not isinstance(value, dict):
        raise ConfigError("image", f"{what} is no JSON object", "An OCI image")
    return value


def _choose(index: dict[str, Any], tag: str | None) -> str:
    """The digest of the entry for this machine, and for `tag` if the index names tags."""
    machine = _MACHINES.get(platform.machine(), platform.machine())
    fitting = []
    for entry in index.get("manifests", []):
        described = entry.get("platform") or {}
        if described.get("os", "linux") != "linux" or described.get("architecture", machine) != machine:
            continue
        named = (entry.get("annotations") or {}).get("org.opencontainers.image.ref.name")
        if tag is None or named is None or named in (tag, tag.rpartition(":")[2]):
            fitting.append(_is_digest(entry.get("digest")))
    if not fitting:
        raise ConfigError(
            "image", f"no image for linux/{machine}{f' called {tag!r}' if tag else ''}", "One built for this machine"
        )
    return fitting[0]


def load(blobs: Blobs, tag: str | None = None) -> Image:
    """Read an image's manifest, unpack its layers, take over its configuration."""
    document = blobs.document("")
    for _ in range(4):  # an index may hold an index
        if "layers" in document:
            break
        document = blobs.document(_choose(document, tag))
        tag = None
    if "layers" not in document:
        raise ConfigError("image", "its index leads to no manifest", "An OCI image")
    config = blobs.document(_is_digest(document["config"]["digest"]), "blobs").get("config") or {}
    layers = [_layer(blobs, _is_digest(entry["digest"])) for entry in document["layers"]]
    env = dict(pair.partition("=")[::2] for pair in config.get("Env") or [])
    return Image(
        layers=(*reversed(layers), mount_points()),
        env={**DEFAULT_ENV, **env},
        cwd=config.get("WorkingDir") or "/",
        user=config.get("User") or None,
    )


def from_layout(path: str | os.PathLike[str], tag: str | None = None) -> Image:
    """An image from a folder in the OCI image layout, or a tar archive of one.

    Raises:
        ConfigError: it is not one, is damaged, or has nothing for this machine.
    """
    place = Path(path)
    if place.is_dir():
        return load(Layout(place), tag)
    folder = tempfile.mkdtemp(prefix="strop-oci-")
    try:
        with tarfile.open(place) as archive:
            archive.extractall(folder, filter="data")
        return load(Layout(Path(folder)), tag)
    except (tarfile.TarError, OSError) as error:
        raise ConfigError("image", f"{str(path)!r} can't be read: {error}", "An OCI image layout") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def from_registry(
    reference: str, *, transport: httpx.BaseTransport | None = None, credentials: tuple[str, str] | None = None
) -> Image:
    """An image from a registry; what is cached by digest is not fetched again."""
    return load(Registry(reference, transport=transport, credentials=credentials))


# ---- layers ----


class _Hashing:
    """A file that is hashed as it is read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self.hash = file, hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.hash.update(data)
        return data


@contextmanager
def _plain(file: IO[bytes]) -> Iterator[IO[bytes]]:
    """The tar stream inside: layers come plain or compressed by gzip."""
    head = file.read(4)
    file.seek(0)
    if head[:2] == b"\x1f\x8b":
        with gzip.open(file) as opened:
            yield opened  # type: ignore[misc]
    elif head == b"\x28\xb5\x2f\xfd":
        raise ConfigError("image", "a layer is compressed with zstd", "Layers that are plain or compressed with gzip")
    else:
        yield file


def _layer(blobs: Blobs, digest: str) -> Path:
    """A layer's folder, unpacked once."""
    if (cache_folder() / f"layer-{digest[7:39]}").is_dir():
        return cache_folder() / f"layer-{digest[7:39]}"

    def build(folder: Path) -> None:
        with blobs.open(digest) as file:
            hashing = _Hashing(file)
            while hashing.read(1 << 20):
                pass
            if hashing.hash.hexdigest() != digest.removeprefix("sha256:"):
                raise ConfigError(
                    "image", f"blob {digest} holds something else", "An image whose blobs match their digests"
                )
            file.seek(0)
            with _plain(file) as plain, tarfile.open(fileobj=plain, mode="r:") as archive:
                unpack_layer(archive, folder)

    try:
        return cached(f"layer-{digest[7:39]}", build)
    except (tarfile.TarError, EOFError, gzip.BadGzipFile) as error:
        raise ConfigError("image", f"layer {digest} can't be unpacked: {error}", "A tar archive") from None


def unpack_layer(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack one layer, with OCI's whiteouts (.wh.NAME, .wh..wh..opq) turned into those of overlayfs."""
    whiteouts: list[tarfile.TarInfo] = []
    plain: list[tarfile.TarInfo] = []
    for member in archive.getmembers():
        name = PurePosixPath("/" + member.name)
        (whiteouts if name.name.startswith(".wh.") else plain).append(member)
    unpack_root(archive, folder, plain)
    for member in whiteouts:
        name = PurePosixPath("/" + member.name)
        place = resolve_parent(folder, name)
        if name.name == ".wh..wh..opq":
            os.setxattr(place.parent, "user.overlay.opaque", b"y")
        elif not place.parent.joinpath(name.name[4:]).exists():
            os.mknod(place.parent / name.name[4:], 0o600 | 0o020000, os.makedev(0, 0))
