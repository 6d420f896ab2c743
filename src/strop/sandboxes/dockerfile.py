"""The part of Dockerfiles that task collections use: FROM, RUN, COPY, WORKDIR, ENV, USER and ARG.

Each step runs in a sandbox; what it changed is a layer, cached by everything that led to it: the base, the steps
before it, and the content of what is copied. Instructions that only describe (LABEL, EXPOSE, CMD, ENTRYPOINT …) are
passed over; the others are refused by name.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import tarfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from strop.errors import ConfigError
from strop.sandboxes.images import Image, cache_folder, cached
from strop.sandboxes.oci import unpack_layer
from strop.sandboxes.pool import LocalPool
from strop.sandboxes.sandbox import MIB, Limits

_DESCRIBES = {"LABEL", "EXPOSE", "CMD", "ENTRYPOINT", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
_KNOWN = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "ARG"}
#: Finds an image by the name that FROM gives it.
FindImage = Callable[[str], Image]


@dataclass(slots=True)
class _State:
    image: Image
    key: str
    variables: dict[str, str] = field(default_factory=dict)


def parse(text: str) -> list[tuple[int, str, str]]:
    """(line number, instruction, rest) of each instruction: comments dropped, continued lines joined.

    Raises:
        ConfigError: an instruction that is not supported.
    """
    found: list[tuple[int, str, str]] = []
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip().startswith("#") or (joined and not line.strip()):
            continue
        start = start if joined else number
        joined += line
        if joined.rstrip().endswith("\\"):
            joined = joined.rstrip()[:-1] + " "
            continue
        if joined.strip():
            instruction, _, rest = joined.strip().partition(" ")
            instruction = instruction.upper()
            if instruction not in _KNOWN | _DESCRIBES:
                raise ConfigError(
                    "dockerfile",
                    f"line {start}: {instruction} is not supported",
                    f"Supported: {', '.join(sorted(_KNOWN))}",
                )
            found.append((start, instruction, rest.strip()))
        joined = ""
    if joined.strip():
        raise ConfigError("dockerfile", "its last line is continued by nothing", "No backslash at the end")
    return found


def expand(text: str, variables: Mapping[str, str]) -> str:
    """$NAME, ${NAME}, ${NAME:-default} and ${NAME:+other} replaced; a backslash keeps a dollar sign."""

    def value(match: re.Match[str]) -> str:
        if match[0].startswith("\\"):
            return match[0][1:]
        name, operator, other = match[1] or match[2], match[3], match[4] or ""
        known = variables.get(name, "")
        if operator == ":-":
            return known or other
        if operator == ":+":
            return other if known else ""
        return known

    return re.sub(r"\\\$|\$(?:(\w+)|\{(\w+)(?:(:-|:\+)([^}]*))?\})", value, text)


def _pairs(rest: str) -> list[tuple[str, str]]:
    """The pairs of ENV: NAME=VALUE …, or the old NAME VALUE."""
    if "=" not in rest.split(maxsplit=1)[0]:
        name, _, value = rest.partition(" ")
        return [(name, value.strip())]
    return [(name, value) for name, _, value in (word.partition("=") for word in shlex.split(rest))]


async def build(
    path: str,
    find: FindImage,
    *,
    context: str | None = None,
    arguments: Mapping[str, str] | None = None,
    limits: Limits | None = None,
) -> Image:
    """Build an image.

    Args:
        path: the Dockerfile.
        find: gives the image for a FROM: for example `Image.from_registry`.
        context: folder that COPY takes from; the Dockerfile's own if None.
        arguments: values of ARGs.
        limits: of the sandboxes that run its steps.

    Raises:
        ConfigError: an instruction that is not supported, a file that is not there, or a RUN that failed, with the
            end of what it printed.
    """
    file = Path(path)
    folder = Path(context) if context is not None else file.parent
    limits = limits or Limits(memory=4096 * MIB, disk=4096 * MIB, inodes=1 << 20, processes=1024, cpus=0, timeout=1800)
    outside: dict[str, str] = {}
    state: _State | None = None
    for line, instruction, rest in parse(file.read_text()):
        if instruction == "ARG":
            name, _, default = rest.partition("=")
            variables = outside if state is None else state.variables
            variables[name] = (arguments or {}).get(
                name, expand(default.strip("\"'"), variables) or outside.get(name, "")
            )
        elif instruction == "FROM":
            if state is not None:
                raise ConfigError("dockerfile", f"line {line}: a second FROM", "A single stage")
            name = expand(rest, outside).split()[0]
            state = _State(find(name), hashlib.sha256(name.encode()).hexdigest())
            state.key = _mixed(state.key, json.dumps([str(layer) for layer in state.image.layers]))
        elif state is None:
            raise ConfigError("dockerfile", f"line {line}: {instruction} before FROM", "FROM first")
        elif instruction not in _DESCRIBES:
            await _apply(state, line, instruction, rest, folder, limits)
    if state is None:
        raise ConfigError("dockerfile", "it has no FROM", "FROM and an image")
    return state.image


def _mixed(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()


async def _apply(state: _State, line: int, instruction: str, rest: str, folder: Path, limits: Limits) -> None:
    seen = {**state.variables, **state.image.env}
    if instruction == "ENV":
        pairs = {name: expand(value, seen) for name, value in _pairs(rest)}
        state.image = state.image.with_env(pairs)
    elif instruction == "USER":
        state.image = replace(state.image, user=expand(rest, seen))
    elif instruction == "WORKDIR":
        place = str(PurePosixPath(state.image.cwd) / expand(rest, seen))
        state.image = replace(state.image, cwd=place)
        await _step(
            state, f"WORKDIR {place}", limits, lambda pool: _run(pool, line, ["mkdir", "-p", place], {}, "/", "root")
        )
    elif instruction == "RUN":
        command = json.loads(rest) if rest.startswith("[") else ["/bin/sh", "-c", rest]
        variables, image = dict(state.variables), state.image
        described = f"RUN {json.dumps([command, variables, dict(image.env), image.cwd, image.user])}"
        await _step(state, described, limits, lambda pool: _run(pool, line, command, variables, image.cwd, image.user))
    else:
        archive, target = _copied(line, expand(rest, seen), folder, state.image.cwd)
        described = f"COPY {target} {hashlib.sha256(archive).hexdigest()}"
        await _step(state, described, limits, lambda pool: _put(pool, archive, target))


async def _run(
    pool: LocalPool, line: int, command: list[str], variables: Mapping[str, str], cwd: str, user: str | None
) -> bytes:
    sandbox = await pool.create()
    result = await sandbox.exec(command, env=variables, cwd=cwd, user=user or "root")
    if not result.ok:
        said = (result.text + result.error_text)[-600:] or str(result.error)
        raise ConfigError(
            "dockerfile",
            f"line {line}: the command ended with {result.exit_code}: {said.strip()}",
            "A command that succeeds",
        )
    return await sandbox.changes()


async def _put(pool: LocalPool, archive: bytes, target: str) -> bytes:
    sandbox = await pool.create()
    await sandbox.put_archive(target, archive)
    return await sandbox.changes()


async def _step(state: _State, described: str, limits: Limits, work: Callable[[LocalPool], Awaitable[bytes]]) -> None:
    """Do a step in a sandbox of the image so far and stack what it changed, unless that is known already."""
    state.key = _mixed(state.key, described)
    name = f"step-{state.key[:32]}"
    if not (cache_folder() / name).is_dir():
        async with LocalPool(replace(state.image, cwd="/", user=None), limits=limits) as pool:
            changed = await work(pool)

        def unpack(folder: Path) -> None:
            with tarfile.open(fileobj=io.BytesIO(changed)) as archive:
                unpack_layer(archive, folder)

        cached(name, unpack)
    state.image = replace(state.image, layers=(cache_folder() / name, *state.image.layers))


def _copied(line: int, rest: str, folder: Path, cwd: str) -> tuple[bytes, str]:
    """(archive, folder inside) of a COPY: times and owners left out, so that equal content is an equal archive."""
    words = json.loads(rest) if rest.startswith("[") else rest.split()
    flags = [word for word in words if word.startswith("--")]
    words = [word for word in words if not word.startswith("--")]
    if flags or len(words) < 2:
        raise ConfigError(
            "dockerfile", f"line {line}: COPY {' '.join(flags) or rest} is not supported", "COPY SOURCE … TARGET"
        )
    *sources, target = words
    place = PurePosixPath(cwd) / target
    into_folder = target.endswith("/") or target in (".", "..") or len(sources) > 1
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for pattern in sources:
            found = [folder / pattern] if (folder / pattern).exists() else sorted(folder.glob(pattern.lstrip("/")))
            if not found:
                raise ConfigError(
                    "dockerfile", f"line {line}: {pattern!r} is not in {str(folder)!r}", "A file of the build context"
                )
            for source in found:
                if not source.resolve().is_relative_to(folder.resolve()):
                    raise ConfigError(
                        "dockerfile",
                        f"line {line}: {pattern!r} is outside of {str(folder)!r}",
                        "A file of the build context",
                    )
                inside = "." if source.is_dir() else source.name if into_folder else place.name
                archive.add(source, inside, filter=_anonymous)
    single_file = not into_folder and not (folder / sources[0]).is_dir()
    return buffer.getvalue(), str(place.parent if single_file else place)


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.mtime, member.uid, member.gid, member.uname, member.gname = 0, 0, 0, "", ""
    return member
