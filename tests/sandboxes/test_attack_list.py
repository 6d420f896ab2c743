"""The list of attacks that must have a test each: a test's name begins with the ids of the attacks that it makes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

#: A processes and CPU, B memory, disk and output, C reading and touching the host, D network, E files and archives,
#: F graders, G the host's own robustness, H whatever else was thought of.
ATTACKS = {
    "A1": "a fork bomb in bash", "A2": "a fork bomb in Python whose children leave their session",
    "A3": "32 busy loops", "A4": "killing process 1", "A5": "killing everything", "A6": "killing processes of the host",
    "A7": "traps and new sessions against a time-out", "A8": "a daemon that is left over",
    "A9": "a daemon that holds the output", "A10": "a command that stops itself",
    "A13": "working directories behind magic links", "A15": "commands that race with the end",
    "B1": "memory without end", "B2": "memory of children", "B3": "memory as files of /dev/shm",
    "B5": "a full disk", "B6": "no more inodes", "B7": "a sparse terabyte", "B9": "a flood of output",
    "B10": "a flood without end", "B12": "a line without end", "B13": "input that nobody reads",
    "B14": "no input", "B15": "huge arguments and environments, NUL bytes", "B16": "bytes that are not text",
    "B18": "core dumps into a handler of the host",
    "C1": "the host's environment", "C2": "descriptors that were left open", "C3": "the agent's memory and links",
    "C4": "the agent's command line", "C5": "files of the host", "C7": "kernel files of /proc", "C8": "devices",
    "C9": "tampering with /dev", "C10": "namespaces and mounts", "C11": "system calls that reach beyond",
    "C13": "set-user-id programs", "C14": "several users must work", "C15": "changing the image",
    "C16": "what the last tenant left", "C17": "kernel keyrings", "C18": "overwriting the helper through /proc",
    "C20": "shared memory between sandboxes",
    "D1": "the host's loopback", "D2": "addresses beyond, and names", "D3": "abstract unix sockets",
    "D4": "unix sockets with a path", "D5": "AF_VSOCK", "D6": "other socket families", "D7": "its own loopback works",
    "D10": "a network with an allow list",
    "E1": "a link out of the sandbox", "E2": "writing through a link", "E4": "special and growing files",
    "E5": "magic links", "E7": "archives that leave their folder", "E8": "owners, modes, times and atomicity",
    "F1": "test settings left by the agent", "F2": "start-up files of Python", "F3": "programs replaced",
    "F4": "leaving before the tests", "F6": "a daemon that waits for the grading", "F7": "reading the hidden tests",
    "F8": "forged reports", "F10": "exhausting the grader",
    "G1": "the host is killed", "G2": "the zygote is killed", "G4": "an agent that lies",
    "G5": "nothing left of descriptors, places or processes", "G8": "a host that lacks what sandboxes need",
    "H1": "a time-out must spare other commands", "H2": "a call that is cancelled", "H3": "signals ignored by the host",
    "H4": "outliving its time to live", "H5": "one quota beside another", "H6": "a variable in a variable's name",
    "H7": "descriptors without end", "H8": "memory files", "H9": "kernel memory of pipes",
    "H10": "other calling conventions", "H11": "looking into a file operation", "H12": "being the host's root",
    "H13": "capabilities", "H14": "the host's processes and mounts", "H15": "raw sockets", "H16": "changing interfaces",
    "H17": "hearing a neighbour", "H18": "a link where a file is put", "H19": "a hostile tree in an archive",
    "H20": "a tree without end", "H21": "half-written files", "H22": "a hostile list of users",
    "H23": "a lease on a shared file", "H24": "inotify instances of all", "H25": "terminals of all",
    "H26": "System V shared memory", "H27": "mounts that are too loose", "H28": "a name like a line of /proc",
    "H29": "a chain of processes that always leave", "H30": "letting orphans go", "H31": "limits of the agent",
    "H32": "between fork and exec", "H33": "stopping every newcomer", "H34": "sockets by other doors",
    "H35": "a daemon that never stops writing", "H36": "output that nobody reads", "H37": "forged answers of a cell",
    "H38": "a list of users without end", "H39": "a snapshot of a hostile tree",
    "H40": "random frames for an agent", "H41": "random frames from an agent", "H42": "random frames for the zygote",
    "H43": "random trees from an agent",
}  # fmt: skip

_ROOMS = (Path(__file__).parent, Path(__file__).parents[1] / "environments")


def ids_with_a_test() -> set[str]:
    """Ids in the names of the tests."""
    functions = (
        node.name
        for room in _ROOMS
        for file in room.glob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    found = (re.match(r"test_((?:[a-h]\d+_)+)", name) for name in functions)
    return {id.upper() for match in found if match for id in match[1].strip("_").split("_")}


def test_every_attack_on_the_list_is_made(anywhere: None) -> None:
    assert ids_with_a_test() == set(ATTACKS), (
        "the first has tests of unknown attacks, or the second attacks without a test"
    )
    assert sum(id.startswith("H") for id in ATTACKS) >= 20
