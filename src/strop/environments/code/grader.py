"""Runs inside a grading sandbox, as its root: holds the hidden tests, drives the solution, reports on its own output.

The solution runs as another user in a process of its own, which is handed calls and gives back plain values. It never
shares a process with the tests, so it can't patch them, forge their report or return objects that equal everything.
Two parts in one file: without arguments it is the grader, with "solution" the other side. Needs Python 3.8 or newer
and imports nothing of strop.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import json
import os
import select
import struct
import subprocess
import sys
import time
from typing import Any

SOLUTION_UID = 65533
MAX_FRAME = 4 << 20


# ---- plain values over a pipe ----


def encode(value: Any, depth: int = 0) -> Any:
    """A plain value as JSON: exact about list, tuple, set, bytes. Raises TypeError for anything that can act."""
    if depth > 200:
        raise TypeError("a value is nested too deeply")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str(value)
    if isinstance(value, int):
        return int(value) if abs(int(value)) < 1 << 53 else ["int", hex(value)]
    if isinstance(value, float):
        return ["float", repr(float(value))]
    if isinstance(value, complex):
        return ["complex", repr(value.real), repr(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(value).hex()]
    for name, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return [name, [encode(item, depth + 1) for item in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, depth + 1), encode(item, depth + 1)] for key, item in value.items()]]
    if hasattr(value, "__next__") or isinstance(value, range):
        return ["list", [encode(item, depth + 1) for item in value]]
    raise TypeError(f"a value of type {type(value).__name__} is not plain data")


def decode(data: Any) -> Any:
    """The value again; whatever is not the encoding of one raises ValueError."""
    if not isinstance(data, list):
        return data
    if not data or not isinstance(data[0], str):
        raise ValueError("not a value")
    kind, rest = data[0], data[1:]
    if kind == "int":
        return int(rest[0], 16)
    if kind == "float":
        return float(rest[0])
    if kind == "complex":
        return complex(float(rest[0]), float(rest[1]))
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "dict":
        return {decode(key): decode(item) for key, item in rest[0]}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    if kind not in kinds:
        raise ValueError("not a value")
    return kinds[kind](decode(item) for item in rest[0])


def write_frame(fd: int, value: Any) -> None:
    data = json.dumps(value).encode()
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


def read_exactly(fd: int, count: int, deadline: float | None) -> bytes:
    data = b""
    while len(data) < count:
        if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError("the solution did not answer in time")
        piece = os.read(fd, min(65536, count - len(data)))
        if not piece:
            raise EOFError("the solution ended")
        data += piece
    return data


def read_frame(fd: int, deadline: float | None = None) -> Any:
    (size,) = struct.unpack("<I", read_exactly(fd, 4, deadline))
    if size > MAX_FRAME:
        raise ValueError("the solution sent too much")
    return json.loads(read_exactly(fd, size, deadline))


# ---- the solution's side ----


def serve_solution() -> None:
    """Load the solution, then answer calls until the pipe closes. Everything here is in the solution's hands."""
    calls, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    scope: dict[str, Any] = {"__name__": "solution", "__builtins__": builtins}
    source = read_frame(calls)
    try:
        exec(compile(source, "solution.py", "exec"), scope)
        write_frame(answers, {"loaded": True})
    except BaseException as error:
        write_frame(answers, {"error": [type(error).__name__, str(error)[:500]]})
        return
    while True:
        request = read_frame(calls)
        try:
            arguments, keywords = decode(request["arguments"]), decode(request["keywords"])
            value = scope[request["name"]](*arguments, **keywords)
            answer = {"value": encode(value), "arguments": encode(arguments)}
        except BaseException as error:
            answer = {"error": [type(error).__name__, str(error)[:500]]}
        write_frame(answers, answer)


# ---- the grader's side ----


class Broken(BaseException):
    """The solution's process can't be used any more: no `except Exception` of a test may swallow it."""


class Solution:
    """The solution's process, and calls into it."""

    def __init__(self, source: str, seconds: float) -> None:
        self.seconds = seconds
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", sys.argv[1], "solution"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            user=SOLUTION_UID,
            group=SOLUTION_UID,
            extra_groups=[],
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
            cwd="/tmp",
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.calls, self.answers = self.process.stdin.fileno(), self.process.stdout.fileno()
        self.exchange(source)

    def exchange(self, request: Any) -> Any:
        """Ask and hear; errors of the solution's own are raised as the built-in of that name, if it is one."""
        try:
            write_frame(self.calls, request)
            answer = read_frame(self.answers, time.monotonic() + self.seconds)
            if not isinstance(answer, dict):
                raise ValueError("not an answer")
            if "error" in answer:
                name, text = str(answer["error"][0]), str(answer["error"][1])
            elif "loaded" in answer:
                return None
            else:
                return decode(answer["value"]), decode(answer["arguments"])
        except (OSError, EOFError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from None
        kind = getattr(builtins, name, None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError
        try:
            raised = kind(text)
        except Exception:
            raised = RuntimeError(text)
        raise raised

    def function(self, name: str) -> Any:
        """A stand-in for one of its functions: plain values in and out, changes to lists and dicts carried back."""

        def call(*arguments: Any, **keywords: Any) -> Any:
            sent = {"name": name, "arguments": encode(list(arguments)), "keywords": encode(keywords)}
            value, after = self.exchange(sent)
            for mine, theirs in zip(arguments, after):  # noqa: B905 -- `strict` came with Python 3.10
                if type(mine) is type(theirs) and mine != theirs and isinstance(mine, (list, dict)):
                    mine.clear()
                    mine.extend(theirs) if isinstance(mine, list) else mine.update(theirs)
            return value

        call.__name__ = name
        return call

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_calls(task: dict[str, Any]) -> list[str | None]:
    """Run each test; what went wrong with it, or None. A broken solution gets a new process for the next test."""
    outcomes: list[str | None] = []
    solution: Solution | None = None
    for test in task["tests"]:
        try:
            if solution is None:
                solution = Solution(task["solution"], task["seconds"])
            scope: dict[str, Any] = {"__name__": "tests"}
            exec(compile(task["setup"], "setup.py", "exec"), scope)
            for name in task["names"]:
                scope[name] = solution.function(name)
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                exec(compile(test, "test.py", "exec"), scope)
            outcomes.append(None)
        except Broken as error:
            outcomes.append(f"broken: {error}")
            if solution is not None:
                solution.end()
            solution = None
        except BaseException as error:
            outcomes.append(f"{type(error).__name__}: {str(error)[:300]}")
    if solution is not None:
        solution.end()
    return outcomes


def run_programs(task: dict[str, Any]) -> list[str | None]:
    """Run the solution as a program on each input and compare what it prints, blanks at line ends aside."""
    outcomes: list[str | None] = []
    path = "/tmp/solution.py"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o444)
    os.fchmod(fd, 0o444)
    with os.fdopen(fd, "w") as file:
        file.write(task["solution"])
    for given, expected in task["tests"]:
        try:
            done = subprocess.run(
                [sys.executable, "-I", path], input=given.encode(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=task["seconds"],
                user=SOLUTION_UID, group=SOLUTION_UID, extra_groups=[], env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp"}, cwd="/tmp",
            )  # fmt: skip
            if done.returncode:
                outcomes.append(f"broken: exit code {done.returncode}")
            elif tidy(done.stdout.decode("utf-8", "replace")) == tidy(expected):
                outcomes.append(None)
            else:
                outcomes.append("wrong output")
        except subprocess.TimeoutExpired:
            outcomes.append("broken: TimeoutError: no end in time")
    return outcomes


def tidy(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def grade() -> None:
    os.umask(0o077)
    task = json.load(sys.stdin)
    outcomes = run_programs(task) if task["kind"] == "program" else run_calls(task)
    json.dump({"nonce": task["nonce"], "outcomes": outcomes}, sys.stdout)


if __name__ == "__main__":
    serve_solution() if sys.argv[-1] == "solution" else grade()
