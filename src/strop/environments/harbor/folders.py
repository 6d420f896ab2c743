"""Reads Harbor's task folders and registries: task.toml, instruction.md, environment/, tests/, solution/.

What a task asks for and strop's sandboxes don't have is refused by its key, before anything runs.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import ConfigError

_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
#: Keys below [environment] that ask for something that is not offered, with what would be right.
_NOT_OFFERED = {
    "gpus": "A task without GPUs",
    "tpu": "A task without TPUs",
    "mcp_servers": "A task whose tools are programs in its image",
    "skills_dir": "A task without skills",
    "healthcheck": "A task that is ready when its image is",
    "allowed_hosts": "A task that needs no network",
}


@dataclass(frozen=True, slots=True)
class TaskFolder:
    """One task.

    Attributes:
        path: its folder.
        name: as task.toml or the registry calls it, else the folder's.
        instruction: what the agent reads.
        image: [environment].docker_image; None where there is a Dockerfile.
        cpus, memory_mb, storage_mb: of its sandbox; None where it does not say.
        workdir: where commands start; None is the image's.
        env: variables of its sandbox.
        needs_network: whether it may use one: Harbor gives one unless a task says no.
        agent_seconds, agent_user: time and user of the agent.
        verifier_seconds, verifier_user, verifier_env: time, user and variables of the tests.
        labels: category, difficulty and the like, from [metadata].
    """

    path: Path
    name: str
    instruction: str
    image: str | None
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    workdir: str | None
    env: Mapping[str, str]
    needs_network: bool
    agent_seconds: float | None
    agent_user: str | int | None
    verifier_seconds: float
    verifier_user: str | int | None
    verifier_env: Mapping[str, str]
    labels: Mapping[str, str]


def find_tasks(place: str) -> list[TaskFolder]:
    """The tasks of a place.

    Args:
        place: a task's folder, a folder of such folders, or "registry.json#dataset" or "registry.json#dataset@version".

    Raises:
        ConfigError: there are none, or one that can't be run here; names the file and the key.
    """
    file, mark, dataset = place.partition("#")
    if mark:
        return [read_task(path, name) for name, path in _of_registry(Path(file), dataset)]
    root = Path(place)
    folders = [root] if (root / "task.toml").is_file() else sorted(path.parent for path in root.glob("*/task.toml"))
    if not folders:
        raise ConfigError(
            "environment.options", f"{place!r} holds no task.toml", "A task's folder, or a folder of such folders"
        )
    return [read_task(folder) for folder in folders]


def _of_registry(file: Path, dataset: str) -> Iterator[tuple[str, Path]]:
    """Names and folders of the tasks that a registry lists."""
    name, _, version = dataset.partition("@")
    try:
        listed = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError("environment.options", f"{file} can't be read: {error}", "A registry of Harbor's") from None
    rows = listed["datasets"] if isinstance(listed, dict) else listed
    found = [row for row in rows if row["name"] == name and version in ("", row["version"])]
    if len(found) != 1:
        there = ", ".join(f"{row['name']}@{row['version']}" for row in rows)
        raise ConfigError("environment.options", f"{file} lists {len(found)} of {dataset!r}", f"One of {there}")
    for task in found[0]["tasks"]:
        if task.get("git_url"):
            raise ConfigError(
                "environment.options",
                f"the task {task['name']!r} is in the repository {task['git_url']}, which is not fetched here",
                "Clone it, and name its folder",
            )
        yield task["name"], file.parent / task["path"]


def read_task(folder: Path, name: str | None = None) -> TaskFolder:
    """One task's folder.

    Args:
        folder: holds task.toml.
        name: in a registry; None takes task.toml's, or the folder's.

    Raises:
        ConfigError: a file is missing, or the task asks for what is not offered here.
    """
    for needed in ("task.toml", "instruction.md", "tests/test.sh"):
        if not (folder / needed).is_file():
            raise ConfigError(str(folder), f"it has no {needed}", "A task folder of Harbor's")
    try:
        asked = tomllib.loads((folder / "task.toml").read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(str(folder / "task.toml"), str(error), "TOML") from None
    environment, agent, verifier = (asked.get(table) or {} for table in ("environment", "agent", "verifier"))
    _refuse(folder, asked)
    memory, storage = (_megabytes(environment, what) for what in ("memory", "storage"))
    metadata = asked.get("metadata") or {}
    labels = {key: value for key in ("category", "difficulty") if isinstance(value := metadata.get(key), str)}
    modes = [table.get("network_mode") for table in (environment, agent, verifier)]
    if modes[0] is None and environment.get("allow_internet") is False:  # how older tasks say it
        modes[0] = "no-network"
    return TaskFolder(
        path=folder,
        name=name or (asked.get("task") or {}).get("name") or folder.name,
        instruction=(folder / "instruction.md").read_text(),
        image=environment.get("docker_image"),
        cpus=environment.get("cpus"),
        memory_mb=memory,
        storage_mb=storage,
        workdir=environment.get("workdir"),
        env=_expanded(folder, environment.get("env") or {}),
        needs_network=modes[0] in (None, "public") or "public" in modes[1:],
        agent_seconds=agent.get("timeout_sec"),
        agent_user=agent.get("user"),
        verifier_seconds=float(verifier.get("timeout_sec") or 600.0),
        verifier_user=verifier.get("user"),
        verifier_env=_expanded(folder, verifier.get("env") or {}),
        labels=labels,
    )


def _refuse(folder: Path, asked: Mapping[str, Any]) -> None:
    def refused(key: str, wrong: str, right: str) -> ConfigError:
        return ConfigError(f"{folder / 'task.toml'}: {key}", wrong, right)

    environment, verifier = asked.get("environment") or {}, asked.get("verifier") or {}
    for key, right in _NOT_OFFERED.items():
        if environment.get(key):
            raise refused(f"environment.{key}", f"it is {environment[key]!r}, which sandboxes here don't have", right)
    if str(environment.get("os", "linux")).lower() != "linux":
        raise refused("environment.os", f"it is {environment['os']!r}", "linux")
    if (folder / "environment" / "docker-compose.yaml").is_file():
        raise ConfigError(
            str(folder / "environment" / "docker-compose.yaml"), "several containers are not offered", "A Dockerfile"
        )
    if not environment.get("docker_image") and not (folder / "environment" / "Dockerfile").is_file():
        raise refused("environment", "there is neither a docker_image nor environment/Dockerfile", "One of the two")
    if asked.get("steps"):
        raise refused("steps", "tasks of several steps are not offered", "A task of one step")
    mode = verifier.get("environment_mode") or ("separate" if verifier.get("environment") else "shared")
    if mode != "shared":
        raise refused("verifier.environment_mode", f"it is {mode!r}, and a second container is not offered", "shared")
    if verifier.get("collect"):
        raise refused("verifier.collect", "collecting files for another container is not offered", "Leave it out")
    modes = {str((asked.get(table) or {}).get("network_mode")) for table in ("environment", "agent", "verifier")}
    if unknown := sorted(modes - {"None", "public", "no-network"}):
        raise refused("network_mode", f"it is {unknown[0]!r}", "no-network, or public for tasks that can do without")


def _megabytes(environment: Mapping[str, Any], what: str) -> int | None:
    """`memory_mb`, or the older `memory` = "2G"."""
    if (value := environment.get(f"{what}_mb")) is not None:
        return int(value)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG])i?B?", str(environment.get(what) or ""), re.IGNORECASE)
    return None if match is None else int(float(match[1]) * (1024 if match[2].upper() == "G" else 1))


def _expanded(folder: Path, env: Mapping[str, Any]) -> dict[str, str]:
    """Variables with ${NAME} and ${NAME:-default} taken from this process's own."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ConfigError(f"{folder / 'task.toml'}: env", f"the variable {match[1]} is not set", "Set it")
        return found

    return {str(name): _VARIABLE.sub(value, str(text)) for name, text in env.items()}
