"""What an agent changed of the tools that its verifier will run, told from outside of the container. Pure.

Where a task is graded in the filesystem its agent left (``grade.harbor``), the agent was often root there: its bash,
its Python and what they load may be its own. The engine knows every path that differs from the image (``docker diff``).
"""

import re
from collections.abc import Collection, Iterable, Iterator

_INSTALLED = r"(usr/local|opt/[^/]+|(root|home/[^/]+)/\.[^/]+)/s?bin"
"""Where programs lie that an image brings besides its distribution's, or a user installs."""
_KEPT = re.compile(
    rf"/((usr/)?s?bin|{_INSTALLED})/.*"
    r"|/(usr/(local/)?)?lib(32|64)?/([^/]+/)?[^/]+\.so[.0-9]*"
    r"|/usr/(local/)?lib/python3[^/]*/(?!(site|dist)-packages/|.*__pycache__/).*"
)
"""An image's programs, the libraries they load and Python's own: what was there must still be what it was. Packages are
not among them: to repair one may be the task."""
_LOADED = re.compile(
    r"/etc/ld\.so\.(preload|cache|conf(\.d/.*)?)"
    r"|.*/(sitecustomize|usercustomize)\.py"
    r"|.*/(site|dist)-packages/([^/]+\.pth|_?pytest(/.*|\.py)|pluggy(/.*|\.py)|[^/]+\.(dist|egg)-info/entry_points\.txt)"
    rf"|/(s?bin|{_INSTALLED})/(ba|da)?sh|/{_INSTALLED}/(env|cat|grep|test|tee|cp|mv|rm|mkdir|chmod|find|stat|tar|timeout"
    r"|python[0-9.]*|pip[0-9.]*|pytest|py\.test|uvx?|node|npm|npx|make|gcc|cc|go|cargo)"
)
"""What programs load or find first, whoever adds it."""


def replaced(changes: Iterable[str], allowed: Collection[str] = ()) -> list[str]:
    """Paths of tools that were changed or removed, or are now shadowed; those in ``allowed`` (the solution's) are not.

    Args:
        changes: lines of ``docker diff``: A, C or D (added, changed, deleted), a space, a path. A folder is changed
            with what is in it, and is no tool.
    """
    every = [(line[:1], line[2:]) for line in changes if line[1:2] == " "]
    folders = set(_above(path for _, path in every))
    found = {path for kind, path in every if path not in folders and _tool(kind, path)}
    return sorted(found.difference(allowed))


def _above(paths: Iterable[str]) -> Iterator[str]:
    for path in paths:
        while path := path.rpartition("/")[0]:
            yield path


def _tool(kind: str, path: str) -> bool:
    if kind in ("C", "D") and _KEPT.fullmatch(path):
        return True
    return kind != "D" and _LOADED.fullmatch(path) is not None
