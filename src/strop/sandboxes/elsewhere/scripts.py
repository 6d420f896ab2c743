"""The shell scripts that sandboxes of other systems are asked to run: one per operation, for any POSIX shell.

Needs what busybox and coreutils both have (base64, head, tail, timeout, mktemp, tar, stat). Bytes travel as base64,
answers in a frame that the command's own output can't forge, since it goes to files.
"""

from __future__ import annotations

import base64
import re
import secrets
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from strop.sandboxes.sandbox import Command

#: Bytes of data in one script: base64 of it stays below the 128 KiB that Linux takes as one argument.
CHUNK = 60_000
#: Marks every process of a command by its environment, so that those that left its process group are found.
_MARK = "STROP_COMMAND"
_KILL = f"""
sweep() {{ for p in /proc/[0-9]*; do n=${{p#/proc/}}
  [ "$n" != "$$" ] && [ "$n" != "$2" ] && tr '\\0' '\\n' <$p/environ 2>/dev/null | grep -q "^{_MARK}=$1" && kill -9 $n
done 2>/dev/null; :; }}
"""
_REPORT = """
size() { wc -c <"$1" | tr -d ' '; }
piece() { printf ' ='; tail -c +$(($2 + 1)) "$1" | head -c $3 | base64 | tr -d '\\n'; }
ends() { if [ $(size "$1") -le $2 ]; then piece "$1" 0 $2
  else printf ' ='; { head -c $(($2 - $2 / 2)) "$1"; tail -c $(($2 / 2)) "$1"; } | base64 | tr -d '\\n'; fi; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A command and how it is run; see `Sandbox.exec`."""

    command: Command
    env: Mapping[str, str]
    cwd: str
    user: str | None


def new_name() -> str:
    """A name that nothing else has."""
    return secrets.token_hex(8)


def encode(data: bytes) -> str:
    """Bytes as text that needs no quoting."""
    return base64.b64encode(data).decode()


def framed(name: str, script: str, answer: str) -> str:
    """A script whose answer is told from everything else that comes back."""
    return f"{_REPORT}{script}\nprintf '\\n%s' '<{name}'; {answer}; printf ' %s>\\n' '{name}'"


def parse(name: str, output: bytes) -> list[bytes]:
    """The fields of an answer: words, and those that begin with "=" decoded.

    Raises:
        ValueError: there is no answer in it.
    """
    found = re.search(rb"<%s(.*) %s>" % (name.encode(), name.encode()), output, re.DOTALL)
    if found is None:
        raise ValueError("the script did not come to its end")
    return [base64.b64decode(word[1:]) if word.startswith(b"=") else word for word in found[1].split()]


def command_line(call: Call, mark: str, before: str = "") -> str:
    """A shell line that becomes the command.

    Args:
        call: what is run.
        mark: value of the marking variable.
        before: words before it, for example of timeout(1).
    """
    arguments = ["/bin/sh", "-c", call.command] if isinstance(call.command, str) else list(call.command)
    if not arguments:
        raise ValueError("a command needs at least its program's name")
    for name in call.env:
        if not name or "=" in name:
            raise ValueError(f"{name!r} can't be the name of a variable")
    variables = [f"{name}={value}" for name, value in {**call.env, _MARK: mark}.items()]
    if any("\0" in text for text in (*arguments, *variables, call.cwd)):
        raise ValueError("a command, its directory or its environment holds a NUL byte")
    inner = ["env", *variables, *arguments]
    line = shlex.join(inner if call.user is None else _as_user(call.user, inner))
    return f"cd {shlex.quote(call.cwd)} || exit 126; exec {before} {line}"


def _as_user(user: str, arguments: Sequence[str]) -> list[str]:
    name, _, group = user.partition(":")
    if name.isdecimal() or group:
        return ["setpriv", f"--reuid={name}", f"--regid={group or name}", "--clear-groups", *arguments]
    return ["su", "-s", "/bin/sh", name, "-c", f"exec {shlex.join(arguments)}"]


def run(name: str, call: Call, stdin: str, seconds: float, kept: int, kill_leftovers: bool) -> str:
    """Run a command to its end. Answer: exit code, bytes of stdout and stderr, both.

    Args:
        name: of the frame and the mark.
        call: what is run.
        stdin: path of a file with its input; removed afterwards.
        seconds: that it may take.
        kept: bytes of each stream.
        kill_leftovers: kill every process of earlier commands too.
    """
    line = command_line(call, name, f"timeout -k 1 {seconds:g}")
    swept = "sweep ''" if kill_leftovers else f"case $c in 124|137) sweep {name};; esac"
    script = f"""{_KILL}
d=$(mktemp -d) || exit 99
( {line} ) <{stdin} >$d/o 2>$d/e; c=$?
{swept}"""
    answer = f"printf ' %s' $c $(size $d/o) $(size $d/e); ends $d/o {kept}; ends $d/e {kept}; rm -rf $d {stdin if stdin != '/dev/null' else ''}"
    return framed(name, script, answer)


# ---- processes that go on ----


def job_folder(name: str) -> str:
    """Where a job's files are: i, o and e (its streams), a (its answers), p (its process), c (its exit code)."""
    return f"/tmp/.strop-{name}"


def start(frame: str, name: str, call: Call) -> str:
    """Start a command that goes on. Its input stays open as long as the holder lives."""
    d = job_folder(name)
    line = command_line(call, name)
    body = f"echo $$ >{d}/p; {line}"
    script = f"""mkdir -m 700 {d} && mkfifo {d}/i && : >{d}/o && : >{d}/e && : >{d}/a || exit 99
( ( sleep 2147483647 >{d}/i & echo $! >{d}/h; sh -c {shlex.quote(body)} <{d}/i >{d}/o 2>{d}/e; echo $? >{d}/n
  kill $(cat {d}/h); mv {d}/n {d}/c ) & ) </dev/null >/dev/null 2>&1
while [ ! -s {d}/p ] && [ ! -e {d}/c ]; do sleep 0.02; done"""
    return framed(frame, script, "printf ' started'")


def write(frame: str, name: str, data: bytes) -> str:
    """Write to a job's input; nothing happens if it does not read any more."""
    d = job_folder(name)
    script = f"[ -e {d}/c ] || printf %s {encode(data)} | base64 -d | timeout 30 sh -c 'cat >{d}/i'"
    return framed(frame, script, "printf ' written'")


def close_input(frame: str, name: str) -> str:
    """Let a job read the end of its input."""
    d = job_folder(name)
    return framed(frame, f"[ -e {d}/c ] || kill $(cat {d}/h)", "printf ' closed'")


def poll(frame: str, name: str, offsets: Sequence[int], patience: float) -> str:
    """Wait for something new of a job. Answer: exit code or "-", what is new of its output, errors and answers.

    Args:
        frame: of the answer.
        name: of the job.
        offsets: bytes of o, e and a that are known.
        patience: seconds to wait for more.
    """
    d = job_folder(name)
    new = " || ".join(f"[ $(size {d}/{file}) -gt {known} ]" for file, known in zip("oea", offsets, strict=True))
    script = f"""[ -d {d} ] || exit 99
i=0; while ! {{ [ -e {d}/c ] || {new}; }} && [ $i -lt {round(patience / 0.05)} ]; do i=$((i + 1)); sleep 0.05; done
c=-; [ -e {d}/c ] && c=$(cat {d}/c)"""
    pieces = "; ".join(f"piece {d}/{file} {known} 262144" for file, known in zip("oea", offsets, strict=True))
    return framed(frame, script, f"printf ' %s' $c; {pieces}")


def signal(frame: str, name: str, number: int) -> str:
    """Send a signal to a job's main process."""
    return framed(frame, f"kill -{number} $(cat {job_folder(name)}/p) 2>/dev/null", "printf ' sent'")


def kill(frame: str, name: str, spare_main: bool) -> str:
    """Kill all processes of a job, or all but its main one."""
    spared = f"$(cat {job_folder(name)}/p)" if spare_main else "0"
    return framed(frame, f"{_KILL}sweep {name} {spared}", "printf ' killed'")


def forget(frame: str, name: str) -> str:
    """Remove a job's files."""
    return framed(frame, f"rm -rf {job_folder(name)}", "printf ' gone'")


# ---- files ----


def read(name: str, path: str, most: int) -> str:
    """Answer: "file" and the contents, or what is wrong."""
    p = shlex.quote(path)
    script = f"""w=file
if [ -d {p} ]; then w=folder; elif [ ! -e {p} ]; then w=missing; elif [ ! -f {p} ]; then w=special
elif [ $(size {p}) -gt {most} ]; then w=large; fi"""
    return framed(name, script, f"printf ' %s' $w; [ $w != file ] || piece {p} 0 {most}")


def append(name: str, path: str, data: bytes) -> str:
    """Add bytes to the end of a file. Answer: whether it worked."""
    line = f"printf %s {encode(data)} | base64 -d >>{shlex.quote(path)} && w=yes || w=no"
    return framed(name, line, "printf ' %s' $w")


def place(name: str, path: str, source: str, mode: int, user: str | None) -> str:
    """Move a file to its place, at once. Answer: "yes", "folder" or "no"."""
    p, folder = shlex.quote(path), shlex.quote(path.rpartition("/")[0] or "/")
    owner = f"chown {shlex.quote(user)} {source} && " if user is not None else ""
    script = f"""w=yes
if [ -d {p} ] && [ ! -L {p} ]; then w=folder
else mkdir -p {folder} && {owner}chmod {mode:o} {source} && mv -fT {source} {p} || w=no; fi 2>/dev/null
rm -f {source}"""
    return framed(name, script, "printf ' %s' $w")


def listing(name: str, path: str) -> str:
    """Answer: "folder", and for each entry mode, size, user, group, time (numbers) and name, each ended by NUL; or what
    is wrong."""
    p = shlex.quote(path)
    script = f"""w=folder; [ -d {p} ] || w=other; [ -e {p} ] || w=missing
entries() {{ for f in "$1"/* "$1"/.[!.]* "$1"/..?*; do [ -e "$f" ] || [ -L "$f" ] || continue
  stat -c '%f %s %u %g %Y' "$f" | tr -d '\\n'; printf '\\0%s\\0' "${{f##*/}}"; done; }}"""
    return framed(name, script, f"printf ' %s =' $w; [ $w != folder ] || entries {p} | base64 | tr -d '\\n'")


def pack(name: str, path: str, target: str) -> str:
    """Make a tar archive of a folder. Answer: "yes" and its size, or what is wrong."""
    p = shlex.quote(path)
    script = f"""w=yes; [ -d {p} ] || w=other; [ -e {p} ] || w=missing
[ $w != yes ] || tar -C {p} -cf {target} . 2>/dev/null || w=no; : >>{target}"""
    return framed(name, script, f"printf ' %s' $w $(size {target})")


def unpack(name: str, path: str, archive: str, user: str | None) -> str:
    """Unpack a tar archive that has been checked. Answer: whether it worked."""
    p = shlex.quote(path)
    owner = (
        f' && tar -tf {archive} | while IFS= read -r n; do chown -h {shlex.quote(user)} {p}/"$n"; done' if user else ""
    )
    script = f"mkdir -p {p} && tar -C {p} -xof {archive}{owner} && w=yes || w=no; rm -f {archive}"
    return framed(name, script, "printf ' %s' $w")


def slice_of(name: str, path: str, offset: int, count: int) -> str:
    """Answer: some bytes of a file."""
    return framed(name, "", f"piece {path} {offset} {count}")


def remove(name: str, path: str) -> str:
    """Remove a file of ours."""
    return framed(name, f"rm -f {path}", "printf ' gone'")
