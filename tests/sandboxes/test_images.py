"""Root file systems from folders, archives, OCI layouts, registries and Dockerfiles, hostile ones among them."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from strop.errors import ConfigError
from strop.sandboxes import Image, LocalPool
from strop.sandboxes.dockerfile import build, expand, parse
from strop.sandboxes.oci import from_layout, from_registry, split_reference


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STROP_CACHE", str(tmp_path / "cache"))


SHELL = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
/* cat, ls-like and id in one static program, so that a root file system needs nothing else. */
int main(int count, char **words) {
    char block[4096];
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(words[i], "r");
        if (!file) { printf("%s: absent\n", words[i]); continue; }
        size_t size = fread(block, 1, sizeof block, file);
        fwrite(block, 1, size, stdout);
        fclose(file);
    }
    printf("uid %d home %s\n", (int)getuid(), getenv("HOME"));
    return 0;
}
"""


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("program")
    (folder / "show.c").write_text(SHELL)
    try:
        subprocess.run(
            ["gcc", "-static", "-Os", "-s", "-o", folder / "show", folder / "show.c"], check=True, capture_output=True
        )
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no C compiler with a static library")
    return (folder / "show").read_bytes()


def layer(
    members: dict[str, bytes | str | None], *, compress: bool = True, modes: dict[str, int] | None = None
) -> bytes:
    """A tar layer: bytes are files, text is a link's target, None is a folder."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.mode = (modes or {}).get(name, 0o755)
            if content is None:
                member.type = tarfile.DIRTYPE
            elif isinstance(content, str):
                member.type, member.linkname = tarfile.SYMTYPE, content
            else:
                member.size = len(content)
            archive.addfile(member, io.BytesIO(content) if isinstance(content, bytes) else None)
    return gzip.compress(buffer.getvalue()) if compress else buffer.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def image_blobs(layers: list[bytes], config: dict[str, Any]) -> tuple[dict[str, bytes], dict[str, Any]]:
    """(blobs by digest, index) of an image."""
    configuration = json.dumps({"architecture": "amd64", "os": "linux", "config": config}).encode()
    described = [
        {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": digest(data), "size": len(data)}
        for data in layers
    ]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": {"digest": digest(configuration), "size": len(configuration)},
            "layers": described,
        }
    ).encode()
    blobs = {digest(data): data for data in [*layers, configuration, manifest]}
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    index = {
        "schemaVersion": 2,
        "manifests": [
            {"digest": "sha256:" + "0" * 64, "platform": {"os": "linux", "architecture": "s390x"}},
            {"digest": digest(manifest), "size": len(manifest), "platform": {"os": "linux", "architecture": machine}},
        ],
    }
    return blobs, index


def write_layout(folder: Path, layers: list[bytes], config: dict[str, Any] | None = None) -> Path:
    blobs, index = image_blobs(layers, config or {})
    (folder / "blobs/sha256").mkdir(parents=True)
    for name, data in blobs.items():
        (folder / "blobs/sha256" / name.removeprefix("sha256:")).write_bytes(data)
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    return folder


async def show(image: Image, *paths: str) -> str:
    async with LocalPool(image) as pool:
        box = await pool.create()
        result = await box.exec(["/bin/show", *paths])
        assert result.ok, result
        return result.text


async def test_a_folder_is_a_root_and_is_never_written_to(tmp_path: Path, program: bytes) -> None:
    root = tmp_path / "root"
    (root / "bin").mkdir(parents=True)
    (root / "bin/show").write_bytes(program)
    (root / "bin/show").chmod(0o755)
    assert await show(Image.from_folder(root), "/nothing") == "/nothing: absent\nuid 0 home /root\n"
    async with LocalPool(Image.from_folder(root)) as pool:
        await (await pool.create()).put("/bin/show", b"changed")
    assert (root / "bin/show").read_bytes() == program and [entry.name for entry in root.iterdir()] == ["bin"]
    with pytest.raises(ConfigError, match="not a folder"):
        Image.from_folder(tmp_path / "nowhere")


async def test_an_archive_is_unpacked_once_by_its_content(tmp_path: Path, program: bytes) -> None:
    (tmp_path / "root.tar.gz").write_bytes(layer({"bin/show": program, "etc/motd": b"hello\n"}))
    first = Image.from_tar(tmp_path / "root.tar.gz")
    assert await show(first, "/etc/motd") == "hello\nuid 0 home /root\n"
    assert Image.from_tar(tmp_path / "root.tar.gz").layers == first.layers


async def test_layers_stack_and_whiteouts_hide(tmp_path: Path, program: bytes) -> None:
    base = layer({"bin/show": program, "etc/a": b"a0\n", "etc/b": b"b0\n", "d/old": b"old\n", "e/x": b"x\n"})
    middle = layer(
        {"etc/.wh.a": b"", "etc/b": b"b1\n", "d": None, "d/.wh..wh..opq": b"", "d/new": b"new\n"}, compress=False
    )
    top = layer({"etc/c": b"c2\n", ".wh.e": b""})
    image = from_layout(
        write_layout(
            tmp_path / "layout",
            [base, middle, top],
            {"Env": ["HELLO=1", "PATH=/bin"], "WorkingDir": "/d", "User": "7:7"},
        )
    )
    assert (image.env["HELLO"], image.env["PATH"], image.cwd, image.user) == ("1", "/bin", "/d", "7:7")
    expected = "/etc/a: absent\nb1\nc2\n/d/old: absent\nnew\n/e/x: absent\nuid 7 home /\n"
    assert await show(image, "/etc/a", "/etc/b", "/etc/c", "/d/old", "/d/new", "/e/x") == expected


async def test_an_archive_of_a_layout_is_read_too(tmp_path: Path, program: bytes) -> None:
    folder = write_layout(tmp_path / "layout", [layer({"bin/show": program})])
    with tarfile.open(tmp_path / "image.tar", "w") as archive:
        archive.add(folder, ".")
    assert await show(Image.from_oci(tmp_path / "image.tar")) == "uid 0 home /root\n"


def test_layers_can_not_write_outside_of_their_folder(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    hostile = [
        {"../../../escaped": b"x"},
        {"a": str(outside), "a/file": b"x"},
        {"a": "../../../..", f"a{outside}/file": b"x"},
        {"a": str(outside), "a/.wh.x": b"", "a/.wh..wh..opq": b""},
        {"a": str(outside / "file"), "a": b"x"},  # noqa: F601 -- the second replaces the link
    ]
    for number, members in enumerate(hostile):
        place = write_layout(tmp_path / f"layout{number}", [layer(members)])
        try:
            from_layout(place)
        except ConfigError:
            continue
    assert list(outside.iterdir()) == [] and not list(tmp_path.rglob("escaped"))


def test_hard_links_in_a_layer_stay_inside(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("stolen")
        member.type, member.linkname = tarfile.LNKTYPE, str(secret)
        archive.addfile(member)
    with pytest.raises((ConfigError, FileNotFoundError)):
        from_layout(write_layout(tmp_path / "layout", [buffer.getvalue()]))
    assert secret.stat().st_nlink == 1


def test_a_damaged_image_is_refused(tmp_path: Path) -> None:
    folder = write_layout(tmp_path / "layout", [layer({"a": b"a"})])
    blobs = sorted((folder / "blobs/sha256").iterdir(), key=lambda path: path.stat().st_size)
    for blob in blobs:
        kept = blob.read_bytes()
        blob.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
        with pytest.raises(ConfigError):
            from_layout(folder)
        blob.write_bytes(kept)
        blob.rename(blob.with_suffix(".gone"))
        with pytest.raises(ConfigError, match="missing"):
            from_layout(folder)
        blob.with_suffix(".gone").rename(blob)
    from_layout(folder)
    with pytest.raises(ConfigError, match=r"no index\.json"):
        from_layout(tmp_path)


async def test_a_registry_is_asked_with_a_token_and_only_once(tmp_path: Path, program: bytes) -> None:
    blobs, index = image_blobs([layer({"bin/show": program})], {"Env": ["A=b"]})
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.host == "auth.example":
            assert dict(request.url.params) == {"service": "registry.example", "scope": "repository:team/box:pull"}
            return httpx.Response(200, json={"token": "secret"})
        if request.headers.get("authorization") != "Bearer secret":
            return httpx.Response(
                401,
                headers={
                    "www-authenticate": 'Bearer realm="https://auth.example/token",service="registry.example",scope="repository:team/box:pull"'
                },
            )
        name = request.url.path.rpartition("/")[2]
        if request.url.path == "/v2/team/box/manifests/v1":
            return httpx.Response(200, json=index)
        is_manifest = b"schemaVersion" in blobs.get(name, b"")
        asked_rightly = is_manifest == ("/manifests/" in request.url.path)
        return httpx.Response(200, content=blobs[name]) if name in blobs and asked_rightly else httpx.Response(404)

    image = from_registry("registry.example/team/box:v1", transport=httpx.MockTransport(answer))
    assert image.env["A"] == "b" and await show(image) == "uid 0 home /root\n"
    before = len(asked)
    from_registry("registry.example/team/box:v1", transport=httpx.MockTransport(answer))
    fetched = [path for path in asked[before:] if "/blobs/" in path]
    assert len(fetched) == 1, "the configuration alone; the layer is in the cache"
    with pytest.raises(ConfigError, match="has no 'v2'"):
        from_registry("registry.example/team/box:v2", transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    ("reference", "parts"),
    [
        ("python", ("registry-1.docker.io", "library/python", "latest")),
        ("python:3.12", ("registry-1.docker.io", "library/python", "3.12")),
        ("team/box:v1", ("registry-1.docker.io", "team/box", "v1")),
        ("ghcr.io/a/b/c:x", ("ghcr.io", "a/b/c", "x")),
        ("localhost:5000/box", ("localhost:5000", "box", "latest")),
        ("r.example/box@sha256:" + "a" * 64, ("r.example", "box", "sha256:" + "a" * 64)),
    ],
)
def test_references_have_dockers_defaults(reference: str, parts: tuple[str, str, str]) -> None:
    assert split_reference(reference) == parts


# ---- Dockerfiles ----

DOCKERFILE = r"""
# a comment
ARG BASE=base
FROM ${BASE}
ARG GREETING=hello
ENV NAME=world OTHER="two words" \
    THIRD=3
ENV OLD style value
WORKDIR /srv
WORKDIR app
COPY a.txt sub/ ./
COPY b.txt /etc/renamed.txt
RUN echo "$GREETING $NAME $OTHER" > made.txt && rm /etc/shells && \
    useradd -m bob
RUN ["/bin/sh", "-c", "cat made.txt > twice.txt; cat made.txt >> twice.txt; pwd >> twice.txt"]
USER bob
LABEL a=b
CMD ["sh"]
"""


def write_context(folder: Path) -> Path:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("A\n")
    (folder / "b.txt").write_text("B\n")
    (folder / "sub/c.txt").write_text("C\n")
    (folder / "Dockerfile").write_text(DOCKERFILE)
    return folder / "Dockerfile"


async def test_a_dockerfile_is_built_and_its_steps_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, base, asked = write_context(tmp_path / "context"), Image.host(), []

    def find(name: str) -> Image:
        asked.append(name)
        return base

    image = await build(str(file), find, arguments={"GREETING": "hi"})
    assert asked == ["base"] and (image.cwd, image.user, image.env["THIRD"], image.env["OLD"]) == (
        "/srv/app",
        "bob",
        "3",
        "style value",
    )
    async with LocalPool(image) as pool:
        box = await pool.create()
        result = await box.exec(
            "cat a.txt c.txt /etc/renamed.txt twice.txt; ls /etc/shells; id -un; stat -c %U /home/bob; echo $NAME"
        )
    assert (
        result.text == "A\nC\nB\nhi world two words\nhi world two words\n/srv/app\nbob\nbob\nworld\n"
        and b"shells" in result.stderr
    )
    steps = sorted(path.name for path in (tmp_path / "cache/images").glob("step-*"))

    async def forbidden(*arguments: object, **keywords: object) -> None:
        raise AssertionError("a cached step was run again")

    with monkeypatch.context() as patched:
        patched.setattr(LocalPool, "start", forbidden)
        assert (await build(str(file), find, arguments={"GREETING": "hi"})).layers == image.layers
    (file.parent / "a.txt").write_text("changed\n")
    changed = await build(str(file), find, arguments={"GREETING": "hi"})
    assert changed.layers != image.layers and len(list((tmp_path / "cache/images").glob("step-*"))) > len(steps)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("FROM x\nADD a b", "line 2: ADD is not supported"),
        ('FROM x\nSHELL ["x"]', "SHELL is not supported"),
        ("RUN true", "line 1: RUN before FROM"),
        ("FROM x\nFROM y", "a second FROM"),
        ("# nothing", "no FROM"),
        ("FROM x\nCOPY nowhere /", "'nowhere' is not in"),
        ("FROM x\nCOPY ../secret /", "outside of"),
        ("FROM x\nCOPY --from=y a b", "--from=y is not supported"),
        ("FROM x\nRUN echo why; exit 3", "line 2: the command ended with 3: why"),
        ("FROM x\nRUN a \\", "continued by nothing"),
    ],
)
async def test_what_a_dockerfile_can_not_have_is_said_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "secret").write_text("s")
    (tmp_path / "context").mkdir()
    (tmp_path / "context/Dockerfile").write_text(text)
    with pytest.raises(ConfigError, match=words):
        await build(str(tmp_path / "context/Dockerfile"), lambda name: Image.host())


def test_variables_are_expanded_as_docker_does() -> None:
    variables = {"A": "1", "LONG": "x y"}
    assert (
        expand(r"$A ${A}b \$A $LONG ${NONE:-d} ${A:-d} ${A:+o} ${NONE:+o} $NONE.", variables) == "1 1b $A x y d 1 o  ."
    )
    assert parse("FROM a\n\n# c\nRUN x \\\n# in between\n  y\n") == [(1, "FROM", "a"), (4, "RUN", "x    y")]


async def test_what_a_sandbox_changed_is_a_layer(tmp_path: Path) -> None:
    async with LocalPool(Image.host()) as pool:
        box = await pool.create()
        await box.exec(
            "echo x > /new; rm /etc/hosts; rm -rf /etc/pam.d; mkdir /etc/pam.d; echo y > /etc/pam.d/only; chown 5:6 /new; chmod 640 /new"
        )
        with tarfile.open(fileobj=io.BytesIO(await box.changes())) as archive:
            members = {member.name: member for member in archive}
    assert {"new", "etc/.wh.hosts", "etc/pam.d/.wh..wh..opq", "etc/pam.d/only"} <= set(members)
    assert (members["new"].uid, members["new"].gid, members["new"].mode) == (5, 6, 0o640)


@pytest.mark.parametrize("allow", [["/"], ["usr"], ["/usr/../etc"], ["/no/such/folder"]])
def test_the_hosts_view_opens_only_what_is_named(allow: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"image\.allow"):
        Image.host(allow)


async def test_a_folder_of_the_host_that_is_allowed_is_read_only(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    (shared / "f").write_text("data\n")
    async with LocalPool(replace(Image.host(["/usr", str(shared)]), cwd="/")) as pool:
        box = await pool.create()
        assert (await box.exec(["cat", str(shared / "f")])).text == "data\n"
        assert not (await box.exec(f"echo x > {shared}/f; echo y > {shared}/g")).ok
    assert (shared / "f").read_text() == "data\n" and [entry.name for entry in shared.iterdir()] == ["f"]
