"""What the kernel does not take with a process that is shot: control groups, directories, Ray's agents, half a start.

A small shell per process of ours reads what to remove from a pipe. When the pipe ends, because we did, it removes what
is still on the list and ends too.
"""

import atexit
import os
import subprocess
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "polar-janitor"
_SCRIPT = r"""
trap '' HUP INT QUIT TERM
declare -A left
while IFS= read -r line; do
    case $line in
        +*) left[${line:1}]=1 ;;
        -*) unset "left[${line:1}]" ;;
    esac
done
born() { local stat; stat=$(< /proc/$1/stat) && set -- ${stat##*) } && [[ $1 != Z ]] && echo ${20}; }
holders() { find /proc/[0-9]*/fd -lname "pipe:?$1?" | cut -d / -f 3 | sort -u; }
gone() {
    case $1 in
        pid:*) set -- ${1#pid:}; [[ $(born $1) != $2 ]] || { kill -9 $1; false; } ;;
        pipe:*) set -- $(holders ${1#pipe:}); [[ $# = 0 ]] || { kill -9 $*; false; } ;;
        /sys/*) [[ ! -d $1 ]] || rmdir -- "$1" ;;
        *) chmod -R u+rwX -- "$1"; rm -rf --one-file-system -- "$1"; [[ ! -e $1 ]] ;;
    esac 2> /dev/null
}
for try in {1..200}; do
    for item in "${!left[@]}"; do
        gone "$item" && unset "left[$item]"
    done
    [[ ${#left[@]} = 0 ]] && exit
    read -rt 0.05 <> <(:)
done
"""
"""Tries for ten seconds: a control group can be removed once its processes are dead, a moment after us."""

_lock = threading.Lock()
_shell: "subprocess.Popen[bytes] | None" = None


def _tell(sign: str, item: str) -> None:
    global _shell  # noqa: PLW0603 - one per process
    if "\n" in item:
        raise ValueError("a line per item")
    with _lock:
        if _shell is None or _shell.poll() is not None:
            _shell = subprocess.Popen(
                [NAME, "-c", _SCRIPT], executable="/bin/bash", stdin=subprocess.PIPE, bufsize=0,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", start_new_session=True,
                env={"PATH": os.defpath},
            )  # fmt: skip
        assert _shell.stdin is not None
        _shell.stdin.write(f"{sign}{item}\n".encode())


@atexit.register
def _end() -> None:
    """At an orderly end the list is empty, and the shell ends with it."""
    if _shell is not None and _shell.stdin is not None:
        _shell.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            _shell.wait(2.0)


def remove_later(path: Path) -> None:
    """Remove ``path`` when this process is gone, unless ``removed`` is called before. Blocks for a fork the first
    time."""
    _tell("+", os.fspath(path))


def removed(path: Path) -> None:
    _tell("-", os.fspath(path))


@contextmanager
def starting(pipe: int) -> Generator[None]:
    """While a process is being started that holds ``pipe``: kill whoever holds it when this process is gone.

    bubblewrap's child sets its own parent-death signal only after it has waited for its parent, on an eventfd that
    knows no end of file: where both we and that parent die before, nothing else ends it.
    """
    item = f"pipe:{os.fstat(pipe).st_ino}"
    _tell("+", item)
    try:
        yield
    finally:
        _tell("-", item)


def kill_later(pid: int) -> None:
    """Kill process ``pid`` when this one is gone and that one is not."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    _tell("+", f"pid:{pid} {stat.rpartition(') ')[2].split()[19]}")
