"""Runs inside a sandbox, in the image's own Python: executes cells that arrive on descriptor 3, answers on 4.

Frames are a 4-byte length and JSON. Must run on any Python 3.8 and newer, and import little: its start is what a
pre-warmed interpreter saves.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import json
import os
import struct
import sys
import traceback


def read_exactly(count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = os.read(3, count - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def send(reply: dict[str, str | None]) -> None:
    data = json.dumps(reply).encode()
    data = struct.pack("<I", len(data)) + data
    while data:
        data = data[os.write(4, data) :]


def evaluate(code: str, scope: dict[str, object]) -> str | None:
    tree = ast.parse(code, "<cell>")
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, "<cell>", "exec"), scope)
        return None
    tree.body.pop()
    exec(compile(tree, "<cell>", "exec"), scope)
    value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), scope)
    return None if value is None else repr(value)[:65536]


def run(code: str, scope: dict[str, object]) -> dict[str, str | None]:
    reply: dict[str, str | None] = {"value": None, "error": None}
    try:
        reply["value"] = evaluate(code, scope)
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            reply["error"] = f"SystemExit: {leaving.code}"
    except BaseException as error:
        skipped = error.__traceback__.tb_next.tb_next if error.__traceback__ and error.__traceback__.tb_next else None
        reply["error"] = "".join(traceback.format_exception(type(error), error, skipped))[-65536:]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    return reply


def run_in_copy(code: str, scope: dict[str, object]) -> None:
    pid = os.fork()
    if pid == 0:
        send(run(code, scope))
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if status:
        send({"value": None, "error": f"the copy of the interpreter ended with wait status {status}"})


def main() -> None:
    for name in json.loads(sys.argv[1]):
        __import__(name)
    del sys.argv[1:]
    scope: dict[str, object] = {"__name__": "__main__", "__builtins__": __builtins__}
    gc.collect()
    gc.freeze()  # copies share these objects' pages with us for as long as nobody, the collector least of all, writes to them
    send({"value": None, "error": None})
    while True:
        request = json.loads(read_exactly(struct.unpack("<I", read_exactly(4))[0]))
        if request["fork"]:
            run_in_copy(request["code"], scope)
        else:
            send(run(request["code"], scope))


main()
