"""What installing a patched project did to its sandbox: files it changed and processes it left, seen by the kernel's
own times and compared with what installing the right fix does.

Installing runs the patch's code (``setup.py``, and the package where that is imported), and can leave behind what runs
in every later Python: a pytest plugin, a ``.pth`` file, another ``bin/pytest``. None of it is in the patch.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from polar_env.errors import SandboxError
from polar_env.sandbox.sandbox import Sandbox
from polar_env.tasks import ENV_PREFIX, WORKDIR

_TIMEOUT = 120.0
_TOOLS = "PATH=/usr/bin:/bin:/usr/sbin:/sbin; export PATH"
"""Installing may have put a ``find`` of its own into the environment, which stands first on the sandbox's path."""
_BEFORE = r"""
date +%s.%N; (cd /proc; echo $$ [0-9]*)
find / "$@" "$HOME" /usr/local /var /run /root -xdev \
    \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /var/tmp \) -prune \
    -o -type d -printf '%p/\0' 2>/dev/null
true
"""
_AFTER = r"""
cd /proc; echo $$; for pid in [0-9]*; do
    while read -r key state rest; do
        if [ "$key" = State: ]; then case $state in Z|X) ;; *) echo "$pid";; esac; break; fi
    done < "$pid/status"
done 2>/dev/null; true
"""
"""Starts nothing, or whoever left so many processes that there is room for no other would be told to have left none."""
_CHANGED = r"""
since=$1; shift
find / "$@" "$HOME" /usr/local /var /run /root -xdev \
    \( -path /proc -o -path /sys -o -path /dev -o -path /tmp -o -path /var/tmp \) -prune -o \( \
        -newerct "@$since" \( -type d -printf '%p/\0' -o -printf '%p\0' \) , \
        -type d ! -perm -700 -exec chmod u+rwx -- {} \; , \
        -newerct "@$since" -path '*/__pycache__/*' ! -type d -exec rm -f -- {} + \) 2>/dev/null
find /tmp /var/tmp /dev/shm -mindepth 1 -type d ! -perm -700 -exec chmod u+rwx -- {} \; 2>/dev/null
find /tmp /var/tmp /dev/shm -mindepth 1 -delete 2>/dev/null; true
"""
"""What changed on every filesystem that can be written to. A folder that its owner closed is opened before it is read.
Compiled files that changed are removed, for one can run in place of a source that did not change, and the others stay.
The temporary folders are emptied: nothing lies in wait."""
_CONTENTS = r"""
for path do
    printf '%s\0' "$path"
    if [ -f "$path" ]; then head -c 65536 -- "$path" | tr -d '\0'; fi
    printf '\0'
done
"""
_LIMIT = 64 * 1024 * 1024
_MOST = 300
"""How many files are read. One more changes nothing: none of them is the right fix's."""
_UNSEEN = "more than can be looked at"
"""Stands for files when looking took too long or gave too much. It worked before, so what was installed is to blame."""

_PLACES = (WORKDIR, ENV_PREFIX)
_EDITABLE = re.compile(r"(__editable__+[^/\s]*?)[-_]\d[\w.+-]*?(?=_finder\b|\.pth\b)")
_SITE = re.compile(r"^(.*/(?:site|dist)-packages)/([^/]+)(/.+)?$")
_METADATA = re.compile(r"[-.](?:dist|egg)-info$|\.egg-link$")
_BUILT = re.compile(rf"^{WORKDIR}/(?:(?:build|dist|\.eggs|[^/]+\.egg-info|[^/]+/[^/]+\.egg-info)/|.*/?__pycache__/)")
_CACHES = re.compile(r"^(/home/[^/]+|/root)/\.cache/|/\.git/index$")
_PROGRAM = re.compile(rf"^{ENV_PREFIX}/bin/[^/]+$")
_PIN = re.compile(r"(?<===)[\w.+!-]+")
_SPEAKING = re.compile(
    rf"\.pth$|/entry_points\.txt$|/\.gitconfig$|(?<!/__pycache__)/__editable__[^/]*$|{_PROGRAM.pattern}"
)
"""Files whose content matters wherever they are allowed to change. Compiled ones are gone."""


@dataclass(frozen=True, slots=True)
class Changes:
    """``files``: paths changed while the project was installed, and folders that are new (they end in a slash; a
    renamed one holds files that did not change). ``contents``: of those that start things."""

    files: frozenset[str] = frozenset()
    contents: frozenset[tuple[str, str]] = frozenset()
    processes: int = 0

    def plain(self) -> dict[str, Any]:
        return {"files": sorted(self.files), "contents": sorted(self.contents), "processes": self.processes}

    @classmethod
    def of(cls, plain: dict[str, Any]) -> "Changes":
        contents = frozenset((path, text) for path, text in plain["contents"])
        return cls(frozenset(plain["files"]), contents, plain["processes"])


@dataclass(slots=True)
class Watch:
    """Taken before installing; ``changes`` afterwards kills what is left running and tells what happened."""

    sandbox: Sandbox
    since: str = ""
    known: frozenset[str] = field(default_factory=frozenset[str])
    folders: frozenset[str] = field(default_factory=frozenset[str])

    @classmethod
    async def begin(cls, sandbox: Sandbox) -> "Watch":
        told, whole = await _look(sandbox, _BEFORE, *_PLACES)
        if not whole:
            raise SandboxError(f"looking at the sandbox before anything was installed: {told[-300:]!r}")
        since, pids, folders = told.split(b"\n", 2)
        return cls(sandbox, since.decode(), frozenset(pids.decode().split()), frozenset(_words(folders)))

    async def changes(self) -> Changes:
        left = await self._left()
        await self.sandbox.kill()
        told, whole = await _look(self.sandbox, _CHANGED, self.since, *_PLACES)
        files = set(_words(told)) - self.folders
        speaking = sorted(path for path in files if _SPEAKING.search(path))[:_MOST]
        told, read = await _look(self.sandbox, _CONTENTS, *speaking) if speaking else (b"", True)
        texts = _words(told)
        unseen = frozenset[str]() if whole and read else frozenset({_UNSEEN})
        return Changes(unseen | files, frozenset(zip(texts[::2], texts[1::2], strict=False)), left)

    async def _left(self) -> int:
        """How many processes are there that were not. One that shoots the question has given itself away."""
        done = await self.sandbox.exec(outside(_AFTER), cwd="/", timeout=_TIMEOUT)
        own, *pids = done.stdout.decode().split() or [""]
        return len(set(pids) - self.known - {own}) if done.code == 0 and own else 1


def outside(script: str, *words: str) -> list[str]:
    """The command line of a shell script of ours that runs the system's own tools, whatever was installed."""
    return ["/bin/sh", "-c", f"{_TOOLS}\n{script}", "polar", *words]


async def _look(sandbox: Sandbox, script: str, *words: str) -> tuple[bytes, bool]:
    """What a script of ours prints, and whether that is all of it."""
    done = await sandbox.exec(outside(script, *words), cwd="/", timeout=_TIMEOUT, output_limit=_LIMIT)
    return done.stdout, done.code == 0 and len(done.stdout) < _LIMIT


def _words(data: bytes) -> list[str]:
    return data.decode("utf-8", "surrogateescape").split("\0")[:-1]


def unlike(found: Changes, right: Changes) -> list[str]:
    """Paths that installing changed and installing the right fix does not, in an order fit for a message. Pure.

    The project's own folders in ``site-packages``, its metadata and its build folders may differ as the patch differs;
    files at the top of ``site-packages``, programs, and what starts by itself may not.
    """
    known = {_unversioned(path): _unversioned(text) for path, text in right.contents}
    odd = {
        path for path, text in found.contents if _starts(path, _unversioned(text), known.get(_unversioned(path), ""))
    }
    own, names = _own(right.files), {_unversioned(path) for path in right.files}
    odd |= {path for path in found.files if _unversioned(path) not in names and not _ours(path, own)}
    return sorted(path.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for path in odd)


def _unversioned(text: str) -> str:
    """A path or a text without the version in an editable installation's names: it may come from the state of git."""
    return _EDITABLE.sub(r"\1", text)


def _starts(path: str, text: str, known: str) -> bool:
    """Does a file start, or install, what the right fix's does not? Of entry points only pytest's plugins do."""
    if path.endswith("/entry_points.txt"):
        return "pytest11" in text and "pytest11" not in known
    if _PROGRAM.match(path):  # old ones ask for the very version they were installed as
        return _PIN.sub("", text) != _PIN.sub("", known)
    return text != known


def _own(files: Iterable[str]) -> frozenset[tuple[str, str]]:
    """(site-packages, project or folder) the right fix's installation writes to."""
    found = (match for path in files if (match := _SITE.match(path)))
    written = (match for match in found if match[3] or _METADATA.search(match[2]))
    return frozenset((match[1], _project(match[2])) for match in written if match[2] != "__pycache__")


def _ours(path: str, own: frozenset[tuple[str, str]]) -> bool:
    if _CACHES.search(path) or _BUILT.match(path):
        return True
    match = _SITE.match(path)
    inside = match and (match[3] or _METADATA.search(match[2]))
    return bool(match and inside and (match[1], _project(match[2])) in own) and not path.endswith(".pth")


def _project(name: str) -> str:
    """``requests-2.27.0.dist-info`` and ``requests.egg-link`` -> ``requests``."""
    return name.partition("-")[0].removesuffix(".egg-link") if _METADATA.search(name) else name
