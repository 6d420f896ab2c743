"""Attacks on the host: reading it, touching its kernel, getting out of the namespaces, reaching a neighbour."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import pytest

from strop.sandboxes import LocalPool, LocalSandbox
from strop.sandboxes.zygote import HELPER

DENIED = {"EPERM", "ENOSYS", "EACCES"}
_CALLS = {
    "add_key": "(b'user', b'a', b'b', 1, -3)",
    "request_key": "(b'user', b'a', 0, -3)",
    "keyctl": "(0, -3, 0)",
    "bpf": "(0, 0, 0)",
    "perf_event_open": "(0, 0, -1, -1, 0)",
    "userfaultfd": "(0,)",
    "io_uring_setup": "(1, 0)",
    "syslog": "(3, 0, 0)",
    "kexec_load": "(0, 0, 0, 0)",
    "init_module": "(0, 0, b'')",
    "finit_module": "(0, b'', 0)",
    "open_by_handle_at": "(0, 0, 0)",
    "name_to_handle_at": "(-100, b'/', 0, 0, 0)",
    "move_mount": "(0, b'', 0, b'', 0)",
    "fsopen": "(b'tmpfs', 0)",
    "open_tree": "(-100, b'/', 1)",
    "mount_setattr": "(-100, b'/', 0, 0, 0)",
    "pidfd_getfd": "(0, 0, 0)",
    "kcmp": "(1, 1, 0, 0, 0)",
    "unshare": "(0x10000000,)",
    "setns": "(0, 0)",
    "clone3": "(0, 0)",
    "clone": "(0x10000011, 0, 0, 0, 0)",
    "mount": "(b'x', b'/mnt', b'tmpfs', 0, 0)",
    "umount2": "(b'/proc', 2)",
    "pivot_root": "(b'/', b'/mnt')",
    "chroot": "(b'/',)",
    "reboot": "(0, 0, 0, 0)",
    "swapon": "(b'/x', 0)",
    "acct": "(0,)",
    "settimeofday": "(0, 0)",
    "fanotify_init": "(0, 0)",
    "memfd_secret": "(0,)",
    "quotactl": "(0, 0, 0, 0)",
    "personality": "(0x0400000,)",
    "ioperm": "(0, 1, 1)",
    "iopl": "(3,)",
    "futex_beyond_the_list": "()",
}
_NUMBERS = {
    "add_key": 248, "request_key": 249, "keyctl": 250, "bpf": 321, "perf_event_open": 298, "userfaultfd": 323, "io_uring_setup": 425,
    "syslog": 103, "kexec_load": 246, "init_module": 175, "finit_module": 313, "open_by_handle_at": 304, "name_to_handle_at": 303,
    "move_mount": 429, "fsopen": 430, "open_tree": 428, "mount_setattr": 442, "pidfd_getfd": 438, "kcmp": 312, "unshare": 272,
    "setns": 308, "clone3": 435, "clone": 56, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "reboot": 169,
    "swapon": 167, "acct": 163, "settimeofday": 164, "fanotify_init": 300, "memfd_secret": 447, "quotactl": 179, "personality": 135,
    "ioperm": 173, "iopl": 172, "futex_beyond_the_list": 500,
}  # fmt: skip


def _call(name: str) -> str:
    return (
        "import ctypes,errno\nlibc=ctypes.CDLL(None,use_errno=True)\n"
        f"r=libc.syscall({_NUMBERS[name]},*{_CALLS[name]})\nprint('done' if r!=-1 else errno.errorcode[ctypes.get_errno()])"
    )


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
async def test_c11_c17_system_calls_that_reach_beyond_are_refused(box: LocalSandbox) -> None:
    answers = {name: (await box.exec(["python3", "-I", "-S", "-c", _call(name)])).text.strip() for name in _CALLS}
    assert {name: answer for name, answer in answers.items() if answer not in DENIED} == {}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the calling conventions are those of x86-64")
async def test_h10_other_calling_conventions_are_no_way_around(box: LocalSandbox) -> None:
    """The x32 numbers have bit 30 set; 32-bit calls come by int 0x80 with numbers of their own (39 is mkdir)."""
    x32 = "import ctypes,errno\nl=ctypes.CDLL(None,use_errno=True)\nprint(l.syscall(0x40000000+165,0,0,0,0,0), errno.errorcode[ctypes.get_errno()])"
    assert (await box.exec(["python3", "-c", x32])).text.split() == ["-1", "ENOSYS"]
    source = 'int main(void){int r; static const char p[]="/tmp/by32"; __asm__ volatile("int $0x80":"=a"(r):"a"(39),"b"((unsigned)(unsigned long)p),"c"(0755):"memory"); return -r;}'
    await box.put("/tmp/a.c", source.encode())
    result = await box.exec(
        "cd /tmp && gcc -static -no-pie -o a a.c 2>/dev/null && ./a; echo $?; ls -d /tmp/by32", timeout=30
    )
    assert result.text.split() == ["38"]  # ENOSYS, and no folder


async def test_debugging_setups_still_work(box: LocalSandbox) -> None:
    script = (
        "import ctypes\nl=ctypes.CDLL(None)\nprint(l.personality(0x0040000)>=0, l.personality(0xffffffff)==0x40000)"
    )
    assert (await box.exec(["python3", "-c", script])).text == "True True\n"


async def test_c10_threads_subprocesses_and_pools_work_without_clone3(box: LocalSandbox) -> None:
    script = (
        "import threading,subprocess,multiprocessing as m\n"
        "t=threading.Thread(target=lambda:print('thread',flush=True));t.start();t.join()\n"
        "print(subprocess.check_output(['echo','child']).decode().strip())\n"
        "if __name__=='__main__':\n with m.get_context('fork').Pool(2) as p: print(p.map(abs,[-1,-2]))"
    )
    assert (await box.exec(["python3", "-c", script], timeout=20)).text == "thread\nchild\n[1, 2]\n"


@pytest.mark.parametrize(
    "command",
    ["unshare -Ur true", "unshare -n true", "unshare -m true", "nsenter -t 1 -m true", "mount -t tmpfs x /mnt", "umount /proc", "chroot / true", "mount -o remount,rw /usr", "umount -l /usr", "mount --bind / /mnt", "hostname other"],
)  # fmt: skip
async def test_c10_namespaces_and_mounts_can_not_be_changed(box: LocalSandbox, command: str) -> None:
    result = await box.exec(command)
    assert not result.ok and b"not found" not in result.stderr


async def test_c1_only_what_is_given_is_in_the_environment(box: LocalSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOST_SECRET", "s3cret")
    result = await box.exec("env", env={"GIVEN": "1"})
    names = {line.split("=")[0] for line in result.text.splitlines()}
    assert names == {"PATH", "HOME", "LANG", "GIVEN", "PWD"}


async def test_c2_only_its_own_descriptors_are_open(box: LocalSandbox) -> None:
    assert (
        await box.exec(["python3", "-c", "import os; print(sorted(os.listdir('/proc/self/fd')))"])
    ).text == "['0', '1', '2', '3']\n"
    assert b"socket" not in (await box.exec("ls -l /proc/self/fd")).stdout


async def test_c3_c4_the_agent_can_not_be_looked_into(box: LocalSandbox) -> None:
    for name in ("environ", "maps", "mem", "auxv", "io", "stack", "syscall"):
        result = await box.exec(["/bin/cat", f"/proc/1/{name}"])
        assert result.stdout == b"" and not result.ok, name
    for name in ("root", "cwd", "exe", "fd", "ns/mnt", "ns/user", "map_files"):
        result = await box.exec(f"ls /proc/1/{name}/ ; readlink /proc/1/{name}")
        assert result.stdout == b"", name
    assert (await box.exec(["/bin/cat", "/proc/1/cmdline"])).stdout == b"sandbox\0"


async def test_c3_the_agent_can_not_be_traced_or_read(box: LocalSandbox) -> None:
    script = (
        "import ctypes,errno\nl=ctypes.CDLL(None,use_errno=True)\n"
        "print(l.ptrace(16,1,0,0), errno.errorcode[ctypes.get_errno()])\n"
        "class V(ctypes.Structure): _fields_=[('b',ctypes.c_void_p),('n',ctypes.c_size_t)]\n"
        "b=ctypes.create_string_buffer(8)\nv=V(ctypes.addressof(b),8)\nw=V(0x400000,8)\n"
        "print(l.process_vm_readv(1,ctypes.byref(v),1,ctypes.byref(w),1,0), errno.errorcode[ctypes.get_errno()])"
    )
    assert (await box.exec(["python3", "-c", script])).text.splitlines() == ["-1 EPERM", "-1 EPERM"]


async def test_c18_the_helper_can_not_be_overwritten_through_proc(box: LocalSandbox) -> None:
    """The way out of CVE-2019-5736: open /proc/PID/exe of the runtime and write."""
    before = hashlib.sha256(HELPER.read_bytes()).digest()
    await box.put("/tmp/x", b"#!/proc/self/exe\n", mode=0o755)
    result = await box.exec(
        "exec 3</proc/1/exe; echo $?; echo junk >/proc/1/exe; /tmp/x; for p in /proc/[0-9]*/exe; do (echo junk > $p) 2>/dev/null; done"
    )
    assert b"0\n" not in result.stdout
    assert hashlib.sha256(HELPER.read_bytes()).digest() == before


async def test_h11_a_file_operation_can_not_be_looked_into_either(box: LocalSandbox) -> None:
    """It runs the agent's own code for a moment: a process of the sandbox that never executed anything."""
    await box.exec("mkdir -p /tmp/d && head -c 15M /dev/zero > /tmp/d/f")
    watch = "import os,time\nend=time.time()+2\nwhile time.time()<end:\n for p in os.listdir('/proc'):\n  if p.isdigit() and p not in ('1',str(os.getpid())):\n   try: os.readlink(f'/proc/{p}/exe'); print('exe')\n   except OSError: pass"
    watcher = await box.start(["python3", "-c", watch])
    for _ in range(10):
        await box.get("/tmp/d/f", max_bytes=20 << 20)
    seen = [chunk.data async for chunk in watcher]
    assert seen == []


async def test_c5_files_of_the_host_are_absent(box: LocalSandbox) -> None:
    with tempfile.NamedTemporaryFile(prefix="strop-marker-") as marker:
        name = Path(marker.name).name
        result = await box.exec(
            f"ls /home /root/.ssh {marker.name} /work /mnt; find / -xdev -name '{name}' 2>/dev/null", timeout=30
        )
        assert name.encode() not in result.stdout
        assert (await box.exec("ls /home /mnt /opt /root")).text.split() == ["/home:", "/mnt:", "/opt:", "/root:"]


async def test_c7_kernel_files_are_denied_or_empty(box: LocalSandbox) -> None:
    for path in (
        "/proc/kcore",
        "/proc/kmsg",
        "/proc/sysrq-trigger",
        "/proc/1/mem",
        "/proc/keys",
        "/proc/vmallocinfo",
        "/proc/slabinfo",
    ):
        result = await box.exec(["/usr/bin/head", "-c", "64", path])
        assert result.stdout == b"", path
    assert (await box.exec("cat /proc/cmdline")).stdout == b""
    assert set((await box.exec("head -n 200 /proc/kallsyms | cut -d' ' -f1 | sort -u")).text.split()) <= {
        "0000000000000000"
    }
    assert not (await box.exec("dmesg")).ok
    for setting in ("kernel/hostname", "kernel/core_pattern", "vm/drop_caches", "kernel/modprobe", "fs/file-max"):
        assert not (await box.exec(f"echo 1 > /proc/sys/{setting}")).ok, setting
    assert not (await box.exec("echo c > /proc/sysrq-trigger")).ok
    assert not (await box.exec("echo x > /proc/cmdline")).ok


async def test_c8_devices_are_the_harmless_ones(box: LocalSandbox) -> None:
    listed = (await box.exec("ls /dev")).text.split()
    assert listed == sorted(
        ["fd", "full", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout", "tty", "urandom", "zero"]
    )
    for command in ("mknod /tmp/sda b 8 0", "mknod /tmp/kvm c 10 232", "cat /dev/kvm", "cat /dev/vda"):
        assert not (await box.exec(command)).ok, command
    assert (
        await box.exec("head -c 8 /dev/urandom | wc -c; echo x > /dev/null; head -c 3 /dev/zero | wc -c")
    ).text.split() == ["8", "3"]


async def test_c9_devices_can_not_be_tampered_with(box: LocalSandbox) -> None:
    for command in (
        "touch /dev/x",
        "chmod 777 /dev/null",
        "rm -f /dev/null",
        "ln -s /tmp /dev/y",
        "mount -o remount,rw /dev",
    ):
        assert not (await box.exec(command)).ok, command


async def test_c13_set_user_id_programs_give_nothing(box: LocalSandbox) -> None:
    line = "cp /usr/bin/id /tmp/id && chmod u+s /tmp/id && useradd bob && su bob -c '/tmp/id -u; /usr/bin/su -c id </dev/null'"
    result = await box.exec(line)
    assert result.text.split()[0] == "1000" and b"uid=0" not in result.stdout


async def test_c14_many_users_work(box: LocalSandbox) -> None:
    result = await box.exec(
        "useradd -m bob && su bob -c id && touch /tmp/f && chown 1000:1000 /tmp/f && stat -c %U /tmp/f && chown 65535 /tmp/f"
    )
    assert result.ok, result.error_text
    assert result.text.startswith("uid=1000(bob)") and result.text.endswith("bob\n")
    assert not (await box.exec("chown 65536 /tmp/f")).ok


async def test_h12_its_root_is_nobody_outside(box: LocalSandbox) -> None:
    assert (await box.exec("cat /proc/self/uid_map")).text.split() == ["0", str(0x70000000), "65536"]


async def test_h13_a_user_loses_every_capability_and_root_keeps_few(box: LocalSandbox) -> None:
    root = int((await box.exec("grep CapEff /proc/self/status")).text.split()[1], 16)
    assert (
        not root >> 21 & 1 and not root >> 12 & 1 and not root >> 13 & 1 and not root >> 19 & 1
    )  # SYS_ADMIN, NET_ADMIN, NET_RAW, SYS_PTRACE
    status = (await box.exec("cat /proc/self/status", user=1000)).text
    fields = dict(line.split(":\t", 1) for line in status.splitlines())
    assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == int(fields["CapAmb"], 16) == 0
    assert (fields["NoNewPrivs"], fields["Seccomp"], fields["Groups"].strip()) == ("1", "2", "")


async def test_c15_the_image_is_not_changed_and_a_neighbour_sees_nothing(box: LocalSandbox, pool: LocalPool) -> None:
    def state() -> list[str]:
        skeleton, python = pool.image.layers[0], Path("/usr/bin/python3")
        shown = [f"{path} {path.lstat().st_mtime_ns} {path.lstat().st_size}" for path in skeleton.rglob("*")]
        return [*sorted(shown), hashlib.sha256(python.read_bytes()).hexdigest()] if python.exists() else sorted(shown)

    neighbour, before = await pool.create(), state()
    await box.exec(
        "rm -rf /etc /var /home 2>/dev/null; echo evil > /usr/bin/python3; rm -rf /usr 2>/dev/null; echo evil > /etc-file; mkdir /etc; echo evil > /etc/passwd"
    )
    assert state() == before
    assert (await neighbour.exec("cat /etc/passwd; python3 -c 'print(1)'")).text.endswith("1\n")
    assert not (await neighbour.exec("ls /etc-file")).ok
    await neighbour.destroy()


async def test_c16_nothing_of_the_last_tenant_is_left(pool: LocalPool) -> None:
    leave = (
        "import socket,subprocess,os,ctypes,time\nopen('/tmp/secret','w').write('x'); open('/dev/shm/secret','w').write('x')\n"
        "l=ctypes.CDLL(None); print(l.shmget(4242,4096,0o1666)>=0)\n"
        "a=socket.socket(socket.AF_UNIX); a.bind('\\0secret'); a.listen()\n"
        "b=socket.socket(); b.bind(('127.0.0.1',8000)); b.listen()\n"
        "c=socket.create_connection(('127.0.0.1',8000)); d,_=b.accept(); d.close(); c.close()\nprint('left',flush=True)\ntime.sleep(60)"
    )
    look = (
        "import socket,os,ctypes\nprint(os.path.exists('/tmp/secret'), os.path.exists('/dev/shm/secret'))\n"
        "l=ctypes.CDLL(None); print(l.shmget(4242,4096,0o666)>=0)\n"
        "a=socket.socket(socket.AF_UNIX)\ntry: a.connect('\\0secret'); print('reached')\nexcept OSError: print('refused')\n"
        "b=socket.socket()\ntry: b.connect(('127.0.0.1',8000)); print('reached')\nexcept OSError: print('refused')\n"
        "print(sum(1 for _ in open('/proc/net/tcp'))-1)\nc=socket.socket(); c.bind(('127.0.0.1',8000)); print('bound')"
    )
    for _ in range(3):  # the same slot every time
        box = await pool.create()
        process = await box.start(["python3", "-c", leave])
        output = b""
        async for chunk in process:
            output += chunk.data
            if b"left" in output:
                break
        assert output == b"True\nleft\n"
        await box.destroy()
        box = await pool.create()
        assert (await box.exec(["python3", "-c", look])).text.split() == [
            "False",
            "False",
            "False",
            "refused",
            "refused",
            "0",
            "bound",
        ]
        await box.destroy()


async def test_c20_shared_memory_is_not_shared_with_a_neighbour(box: LocalSandbox, pool: LocalPool) -> None:
    neighbour = await pool.create()
    await box.exec("echo x > /dev/shm/x; echo x > /tmp/x")
    assert not (await neighbour.exec("cat /dev/shm/x /tmp/x")).ok
    await neighbour.destroy()


async def test_c11_terminal_input_can_not_be_forged(box: LocalSandbox) -> None:
    script = "import fcntl,termios,os,pty\nm,s=pty.openpty()\nos.setsid()\nfcntl.ioctl(s,termios.TIOCSCTTY,0)\ntry: fcntl.ioctl(s,termios.TIOCSTI,b'x'); print('forged')\nexcept OSError as e: print(e.errno)"
    assert (
        await box.exec(
            ["python3", "-c", "import os\nif os.fork()==0:\n " + script.replace("\n", "\n ") + "\nelse: os.wait()"]
        )
    ).text == "1\n"


async def test_h14_proc_of_the_host_is_not_visible(box: LocalSandbox) -> None:
    assert len((await box.exec("ls -d /proc/[0-9]*")).text.split()) <= 4
    mounts = (await box.exec("cat /proc/self/mountinfo")).text
    assert str(Path.home()) not in mounts and "/tmp/" not in mounts and "cgroup" not in mounts


async def test_tracing_inside_works_and_does_not_reach_outside(box: LocalSandbox) -> None:
    script = "import ctypes,os,signal,time\nl=ctypes.CDLL(None)\npid=os.fork()\nif pid==0: time.sleep(30)\nprint(l.ptrace(16,pid,0,0)); os.waitpid(pid,0); os.kill(pid,9)"
    assert (await box.exec(["python3", "-c", script])).text == "0\n"
