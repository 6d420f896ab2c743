"""Attacks over the network: there is none but a loopback of its own. Only loopback is ever touched here."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strop.sandboxes import Image, LocalPool, LocalSandbox


@pytest.fixture(params=["none", "fresh"])
async def pool(request: pytest.FixtureRequest, host_image: Image) -> AsyncIterator[LocalPool]:
    async with LocalPool(host_image, network=request.param) as pool:
        yield pool


def connect(address: str, family: str = "AF_INET") -> list[str]:
    return [
        "python3",
        "-c",
        f"import socket\ns=socket.socket(socket.{family})\ns.settimeout(3)\ntry: s.connect({address}); print('reached')\nexcept OSError as e: print(type(e).__name__)",
    ]


async def test_d1_the_hosts_loopback_is_not_reached(box: LocalSandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert (await box.exec(connect(f"('127.0.0.1',{port})"))).text == "ConnectionRefusedError\n"


@pytest.mark.parametrize("address", ["('169.254.169.254',80)", "('10.0.0.1',80)", "('192.0.2.1',443)"])
async def test_d2_no_route_leads_out(box: LocalSandbox, address: str) -> None:
    assert (await box.exec(connect(address))).text == "OSError\n"
    assert (
        await box.exec(
            [
                "python3",
                "-c",
                "import socket\ntry: socket.getaddrinfo('example.org',80)\nexcept socket.gaierror: print('none')",
            ]
        )
    ).text == "none\n"
    assert [line.split(":")[0].strip() for line in (await box.exec("cat /proc/net/dev")).text.splitlines()[2:]] == [
        "lo"
    ]


async def test_d3_d4_unix_sockets_of_the_host_are_not_reached(box: LocalSandbox) -> None:
    with (
        socket.socket(socket.AF_UNIX) as abstract,
        socket.socket(socket.AF_UNIX) as named,
        tempfile.TemporaryDirectory() as folder,
    ):
        abstract.bind("\0strop-test-socket")
        abstract.listen()
        path = str(Path(folder) / "h.sock")
        named.bind(path)
        named.listen()
        assert (await box.exec(connect(repr("\0strop-test-socket"), "AF_UNIX"))).text == "ConnectionRefusedError\n"
        assert (await box.exec(connect(repr(path), "AF_UNIX"))).text == "FileNotFoundError\n"
        assert (await box.exec(connect("'/run/docker.sock'", "AF_UNIX"))).text == "FileNotFoundError\n"


@pytest.mark.parametrize(
    ("family", "kind", "protocol"),
    [
        (40, 1, 0),
        (38, 5, 0),
        (17, 3, 0),
        (31, 3, 0),
        (44, 3, 0),
        (30, 1, 0),
        (21, 5, 0),
        (29, 3, 1),
        (16, 3, 9),
        (16, 3, 16),
        (16, 3, 6),
    ],
    ids=[
        "vsock",
        "alg",
        "packet",
        "bluetooth",
        "xdp",
        "tipc",
        "rds",
        "can",
        "netlink audit",
        "netlink generic",
        "netlink xfrm",
    ],
)
async def test_d5_d6_other_socket_families_are_refused(
    box: LocalSandbox, family: int, kind: int, protocol: int
) -> None:
    script = f"import socket,errno\ntry: socket.socket({family},{kind},{protocol}); print('made')\nexcept OSError as e: print(errno.errorcode[e.errno])"
    assert (await box.exec(["python3", "-c", script])).text == "EAFNOSUPPORT\n"


async def test_h15_raw_sockets_are_refused(box: LocalSandbox) -> None:
    script = "import socket\ntry: socket.socket(socket.AF_INET,socket.SOCK_RAW,1); print('made')\nexcept PermissionError: print('refused')"
    assert (await box.exec(["python3", "-c", script])).text == "refused\n"


async def test_d7_its_own_loopback_works(box: LocalSandbox) -> None:
    script = (
        "import socket,threading\nfor host,family in (('127.0.0.1',socket.AF_INET),('::1',socket.AF_INET6)):\n"
        " for port in (80,8000):\n  s=socket.create_server((host,port),family=family)\n"
        "  t=threading.Thread(target=lambda: s.accept()[0].sendall(b'hi'));t.start()\n"
        "  c=socket.create_connection((host,port));print(c.recv(2).decode());t.join();s.close()"
    )
    assert (await box.exec(["python3", "-c", script])).text.split() == ["hi"] * 4


async def test_h16_interfaces_and_routes_can_not_be_made(box: LocalSandbox) -> None:
    """Even where its namespace is its own, the capability to administer it is gone."""
    script = "import socket,fcntl,struct\ns=socket.socket(socket.AF_INET,socket.SOCK_DGRAM)\ntry: fcntl.ioctl(s,0x8914,struct.pack('16sh14x',b'lo',0)); print('down')\nexcept PermissionError: print('refused')"
    assert (await box.exec(["python3", "-c", script])).text == "refused\n"


async def test_h17_two_sandboxes_do_not_hear_each_other(box: LocalSandbox, pool: LocalPool) -> None:
    neighbour = await pool.create()
    server = await box.start(
        [
            "python3",
            "-u",
            "-c",
            "import socket,time\ns=socket.create_server(('127.0.0.1',9000))\na=socket.socket(socket.AF_UNIX);a.bind('\\0both');a.listen()\nprint('up');time.sleep(60)",
        ]
    )
    async for _ in server:
        break
    assert (await neighbour.exec(connect("('127.0.0.1',9000)"))).text == "ConnectionRefusedError\n"
    assert (await neighbour.exec(connect(repr("\0both"), "AF_UNIX"))).text == "ConnectionRefusedError\n"
    await neighbour.destroy()
