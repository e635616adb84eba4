"""Count what runs on this machine before and after a command, and name what the command left behind.

    python tests/census.py before.json -- make demo     # census, run the command, census again; exit 1 on leftovers
    python tests/census.py before.json                  # only take a census and write it
    python tests/census.py --since before.json          # compare with one taken before

Counted: processes (with their descendants' start times, so a reused pid is a new process), mounts, listening TCP
sockets, network namespaces, our control groups, and /tmp entries whose name starts with ``polar``. Linux, standard
library only. Command lines are cut to their first two words: arguments may carry keys.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

GRACE = 10.0
"""Seconds a process that was told to end may take to be gone after the command returned."""

OURS = ("polar",)
"""How names of our control groups and temporary files start."""


@dataclass(frozen=True)
class Census:
    """What there is. Every entry identifies one thing and maps to what a reader needs to find it."""

    processes: dict[str, str]
    """``pid@start`` (clock ticks since boot) -> the first words of its command line."""
    mounts: dict[str, str]
    """mount id -> ``type target``."""
    ports: dict[str, str]
    """``tcp address:port``, ``tcp6 ...`` -> socket inode."""
    namespaces: dict[str, str]
    """network namespace id -> a pid in it, or the file that holds it."""
    cgroups: dict[str, str]
    files: dict[str, str]

    def left_behind(self, before: "Census") -> dict[str, list[str]]:
        """What is here now and was not before, by kind; empty when nothing is."""
        found: dict[str, list[str]] = {}
        for field in fields(self):
            now, then = getattr(self, field.name), getattr(before, field.name)
            extra = [f"{key}  {now[key]}".rstrip() for key in sorted(now.keys() - then.keys())]
            if extra:
                found[field.name] = extra
        return found


def census() -> Census:
    """Count now. Processes that end while they are read are left out, and so is this one."""
    return Census(
        processes=dict(_processes()),
        mounts=dict(_mounts()),
        ports=dict(_ports()),
        namespaces=dict(_namespaces()),
        cgroups=dict(_cgroups()),
        files={str(path): "" for path in sorted(Path("/tmp").glob(f"{OURS[0]}*"))},
    )


def _pids() -> list[int]:
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _processes() -> Iterator[tuple[str, str]]:
    for pid in _pids():
        try:
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        name, after = stat[stat.index("(") + 1 : stat.rindex(")")], stat[stat.rindex(")") + 2 :].split()
        kernel = after[1] == "2" or pid == 2
        if kernel or pid == os.getpid():
            continue
        words = [
            Path(word.decode("utf-8", "replace")).name for word in command[:2] if word and not word.startswith(b"-")
        ]
        state = " (zombie)" if after[0] == "Z" else ""
        yield f"{pid}@{after[19]}", (" ".join(words) or name) + state


def _mounts() -> Iterator[tuple[str, str]]:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        left, _, right = line.partition(" - ")
        words = left.split()
        yield words[0], f"{right.split()[0]} {words[4]}"


def _ports() -> Iterator[tuple[str, str]]:
    for kind in ("tcp", "tcp6"):
        table = Path(f"/proc/net/{kind}")
        for line in table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else []:
            words = line.split()
            if words[3] == "0A":
                address, port = words[1].split(":")
                yield f"{kind} {address}:{int(port, 16)}", f"inode {words[9]}"


def listeners(pids: Iterable[int]) -> dict[str, str]:
    """``inode`` -> address of every listening socket that one of these processes holds, TCP or UNIX. Of this process
    also those in network namespaces that it is not in itself, such as a sandbox's."""
    found: dict[str, str] = {}
    for pid in pids:
        held = {link.removeprefix("socket:[").removesuffix("]") for _, link in _sockets(pid)}
        found |= {inode: address for inode, address in _listening(pid) if inode in held}
        if pid == os.getpid():
            found |= {inode: found.get(inode, "in another namespace") for inode in _accepting()}
    return found


def _sockets(pid: int) -> Iterator[tuple[int, str]]:
    try:
        entries = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for entry in entries:
        try:
            link = str(entry.readlink())
        except OSError:
            continue
        if link.startswith("socket:"):
            yield int(entry.name), link


def _accepting() -> Iterator[str]:
    """Inodes of this process's listening sockets, as the sockets themselves say."""
    for number, link in _sockets(os.getpid()):
        try:
            with socket.socket(fileno=os.dup(number)) as held:
                if held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield link.removeprefix("socket:[").removesuffix("]")
        except OSError:
            continue


def _listening(pid: int) -> Iterator[tuple[str, str]]:
    """(inode, address) of the network namespace a process is in."""
    for kind in ("tcp", "tcp6", "unix"):
        try:
            lines = Path(f"/proc/{pid}/net/{kind}").read_text(encoding="utf-8", errors="replace").splitlines()[1:]
        except OSError:
            continue
        for words in map(str.split, lines):
            if kind == "unix" and int(words[3], 16) & 0x10000:  # __SO_ACCEPTCON of the kernel's include/linux/net.h
                yield words[6], " ".join(["unix", *words[7:]])
            elif kind != "unix" and words[3] == "0A":
                address, port = words[1].split(":")
                yield words[9], f"{kind} {address}:{int(port, 16)}"


def _namespaces() -> Iterator[tuple[str, str]]:
    """Network namespaces that a process lives in or a mounted file keeps alive."""
    seen: dict[str, str] = {}
    for pid in _pids():
        try:
            seen.setdefault(str(Path(f"/proc/{pid}/ns/net").readlink()), f"pid {pid}")
        except OSError:
            continue
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        if " - nsfs " in line:
            words = line.split()
            seen.setdefault(words[3].removeprefix("/"), f"file {words[4]}")
    yield from seen.items()


def _cgroups() -> Iterator[tuple[str, str]]:
    """Control groups of ours, wherever below the mounted hierarchies."""
    for folder, below, _ in os.walk("/sys/fs/cgroup"):
        for name in below:
            if name.startswith(OURS):
                yield str(Path(folder) / name), ""


def settle(before: Census, grace: float = GRACE) -> dict[str, list[str]]:
    """What is left behind once it stopped shrinking: at once when nothing is, else after ``grace`` seconds."""
    deadline = time.monotonic() + grace
    left = census().left_behind(before)
    while left and time.monotonic() < deadline:
        time.sleep(0.1)
        left = census().left_behind(before)
    return left


def report(left: dict[str, list[str]]) -> str:
    if not left:
        return "census: nothing left behind"
    lines = [f"census: left behind: {', '.join(f'{len(items)} {kind}' for kind, items in left.items())}"]
    return "\n".join([*lines, *(f"  {kind}: {item}" for kind, items in left.items() for item in items)])


def counts(now: Census) -> str:
    return ", ".join(f"{len(getattr(now, field.name))} {field.name}" for field in fields(now))


def read(path: Path) -> Census:
    return Census(**json.loads(path.read_text(encoding="utf-8")))


def main(argv: Sequence[str]) -> int:
    own, command = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="where the census before is written, or read with --since")
    parser.add_argument("--since", action="store_true", help="compare with the census in FILE")
    parser.add_argument("--grace", type=float, default=GRACE, help="seconds ended processes may take to be gone")
    options = parser.parse_args(list(own))
    if options.since:
        left = settle(read(options.file), options.grace)
        print(report(left), flush=True)
        return 1 if left else 0
    before = census()
    options.file.write_text(json.dumps(asdict(before), indent=1) + "\n", encoding="utf-8")
    print(f"census: before: {counts(before)}", flush=True)
    if not command:
        return 0
    code = subprocess.run(list(command), check=False).returncode
    left = settle(before, options.grace)
    print(f"census: after: {counts(census())}")
    print(report(left), flush=True)
    return code or (1 if left else 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
