"""Reading a source tree with ``ast``, and the checks that test_architecture.py makes on it.

Every check takes a tree and returns findings, ``file:line: what is wrong and what to do``; no findings is a pass.
Modules are named relative to the package: ``proxy`` is ``proxy/__init__.py``, ``proxy.sse`` is ``proxy/sse.py``, and
``""`` is the package's own ``__init__.py``.
"""

import ast
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

LONGEST_FILE = 400
LONGEST_FUNCTION = 60
MEDIAN_FUNCTION = 10
P90_FUNCTION = 30
BROAD_EXCEPTS = 8
TESTS_PER_SOURCE = 1.2


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def is_room(self) -> bool:
        return self.path.name == "__init__.py" and bool(self.name)

    def at(self, node: ast.AST) -> str:
        return f"{self.path.name if not self.name else self.name.replace('.', '/')}:{getattr(node, 'lineno', 0)}"


@dataclass(frozen=True)
class Row:
    """One line of the import table. ``may`` holds patterns of module names; a row names only rows above it."""

    modules: str
    level: int
    may: tuple[str, ...] = ()


Tree = Mapping[str, Module]


def read_tree(package: Path) -> Tree:
    """Every module below ``package``."""
    modules: dict[str, Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        modules[name] = Module(name, path, text, ast.parse(text))
    return modules


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def foreign_imports(module: Module) -> Iterator[tuple[str, ast.AST]]:
    """Dotted names of everything imported, wherever in the file."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((f"{base}.{alias.name}", node) for alias in node.names)


def edges(module: Module, tree: Tree, package: str = "polar_env") -> Iterator[tuple[str, ast.AST]]:
    """The modules of ours this one imports; a name imported from a module counts as that module."""
    for dotted, node in foreign_imports(module):
        if dotted == package or dotted.startswith(package + "."):
            inner = dotted.removeprefix(package).lstrip(".")
            while inner and inner not in tree:
                inner = inner.rpartition(".")[0]
            yield inner, node


def row_of(name: str, table: Sequence[Row]) -> Row | None:
    return next((row for row in table if fnmatchcase(name, row.modules)), None)


# --- checks -----------------------------------------------------------------------------------------------------


def wrong_imports(tree: Tree, table: Sequence[Row]) -> list[str]:
    """Edges the table does not hold, and modules it does not know."""
    found: list[str] = []
    for module in tree.values():
        row = row_of(module.name, table)
        if row is None:
            found.append(f"{module.name or '__init__'}: no row of the import table; add one, or move the file")
            continue
        for target, node in edges(module, tree):
            if target != module.name and not matches(target, row.may):
                found.append(f"{module.at(node)}: {module.name or '__init__'} may not import {target or 'polar_env'}")
    return found


def unsound_rows(table: Sequence[Row]) -> list[str]:
    """Rows that allow an import of a row below them: with none, the table itself rules out cycles between rooms."""
    found: list[str] = []
    for place, row in enumerate(table):
        room = row.modules.partition(".")[0]
        for pattern in row.may:
            own = row.modules.endswith(".*") and pattern.partition(".")[0] == room
            if not own and pattern not in {above.modules for above in table[:place]}:
                found.append(f"{row.modules}: allows {pattern}, which is no row above it")
        above = [other.level for other in table[:place]]
        if above and row.level < max(above):
            found.append(f"{row.modules}: level {row.level} below a row of level {max(above)}")
    return found


def cycles(tree: Tree) -> list[str]:
    """Import cycles, each once, as ``a -> b -> a``."""
    graph = {name: {target for target, _ in edges(module, tree)} - {name} for name, module in tree.items()}
    found: list[str] = []
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        if name in path:
            found.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done:
            for target in sorted(graph[name]):
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])
    return found


def strangers(tree: Tree, doors: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Third-party packages imported outside the modules that are their only door."""
    return [
        f"{module.at(node)}: only {', '.join(doors[top])} may import {top}"
        for module in tree.values()
        for dotted, node in foreign_imports(module)
        if (top := dotted.partition(".")[0]) in doors and not matches(module.name, doors[top])
    ]


def impure(tree: Tree, pure: Sequence[str], banned: Sequence[str]) -> list[str]:
    """Pure modules that import a banned package, are asynchronous, or open a file."""
    found: list[str] = []
    for module in (module for module in tree.values() if matches(module.name, pure)):
        found += [
            f"{module.at(node)}: {module.name} is pure and may not import {dotted.partition('.')[0]}"
            for dotted, node in foreign_imports(module)
            if dotted.partition(".")[0] in banned
        ]
        for node in ast.walk(module.tree):
            asynchronous = isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncWith | ast.AsyncFor)
            opens = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "open"
            if asynchronous or opens:
                found.append(f"{module.at(node)}: {module.name} is pure: no async, no files")
    return found


def environment_readers(tree: Tree, allowed: Sequence[str] = ("config",)) -> list[str]:
    """Uses of the process environment outside config.py."""
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    found: list[str] = []
    for module in (module for module in tree.values() if not matches(module.name, allowed)):
        for node in ast.walk(module.tree):
            attribute = isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value) == "os"
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and names & {a.name for a in node.names}
            if attribute or imported:
                found.append(f"{module.at(node)}: only config.py reads the environment; use config.environment()")
    return found


def functions(tree: Tree) -> Iterator[tuple[Module, ast.FunctionDef | ast.AsyncFunctionDef, int]]:
    """Every function with its length in lines."""
    for module in tree.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield module, node, (node.end_lineno or node.lineno) - node.lineno + 1


def oversized(tree: Tree) -> list[str]:
    """Files, functions and averages over the numbers of the house."""
    found = [
        f"{module.name}: {lines} lines ({LONGEST_FILE})"
        for module in tree.values()
        if (lines := module.text.count("\n")) > LONGEST_FILE
    ]
    measured = list(functions(tree))
    found += [
        f"{module.at(node)}: {node.name} has {size} lines ({LONGEST_FUNCTION})"
        for module, node, size in measured
        if size > LONGEST_FUNCTION
    ]
    sizes = sorted(size for _, _, size in measured) or [0]
    if statistics.median(sizes) > MEDIAN_FUNCTION:
        found.append(f"the median function has {statistics.median(sizes)} lines ({MEDIAN_FUNCTION})")
    if sizes[int(len(sizes) * 0.9)] > P90_FUNCTION:
        found.append(f"one function in ten has more than {sizes[int(len(sizes) * 0.9)]} lines ({P90_FUNCTION})")
    return found


def rooms_that_import_members(tree: Tree) -> list[str]:
    """Room ``__init__`` files run on any import of a child, so they may not import one (dotted-path tables do)."""
    return [
        f"{module.at(node)}: {module.name}/__init__.py imports its member {target}"
        for module in tree.values()
        if module.is_room
        for target, node in edges(module, tree)
        if target.startswith(module.name + ".")
    ]


def broad_excepts(tree: Tree) -> tuple[list[str], list[str]]:
    """(all handlers that catch everything, those of them that do not say why on their line)."""
    every: list[str] = []
    bare: list[str] = []
    for module in tree.values():
        lines = module.text.splitlines()
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and _catches_all(node):
                every.append(module.at(node))
                if not re.search(r":\s+# (noqa: BLE001 - )?(?!noqa)\w", lines[node.lineno - 1]):
                    bare.append(f"{module.at(node)}: a broad except gives its reason: `# noqa: BLE001 - why`")
    return every, bare


def _catches_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"}) for kind in kinds
    )


def stray_tasks(tree: Tree) -> list[str]:
    """Tasks outside a TaskGroup: nobody awaits them and nobody sees them fail."""
    banned = {"asyncio.create_task", "asyncio.gather", "asyncio.ensure_future", "asyncio.get_event_loop"}
    found: list[str] = []
    for module in tree.values():
        for node in ast.walk(module.tree):
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called in banned or re.search(r"loop(\(\))?\.create_task$", called):
                found.append(f"{module.at(node)}: {called}: tasks live in a TaskGroup")
    return found


def containing(folder: Path, word: str) -> list[str]:
    """Python files below ``folder`` that contain ``word``."""
    return [
        f"{path.relative_to(folder)}:{number}"
        for path in sorted(folder.rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if word in line.lower()
    ]


def code_lines(folder: Path) -> int:
    """Lines of Python below ``folder`` that are neither blank nor only a comment."""
    texts = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    lines = (line.strip() for text in texts for line in text.splitlines())
    return sum(1 for line in lines if line and not line.startswith("#"))


# --- the map ----------------------------------------------------------------------------------------------------


def map_lines(text: str) -> str:
    """The tree drawn in ``text``: the indented block that starts at the line ``src/polar_env/``, dedented."""
    lines = text.splitlines()
    start = next((place for place, line in enumerate(lines) if line.strip() == "src/polar_env/"), None)
    if start is None:
        return ""
    margin = len(lines[start]) - len(lines[start].lstrip())
    block = [lines[start][margin:]]
    for line in lines[start + 1 :]:
        if not line[margin:].startswith("  "):
            break
        block.append(line[margin:].rstrip())
    return "\n".join(block)


def mapped(drawn: str) -> dict[str, bool]:
    """Paths a drawn tree names, relative to the package -> whether they are there already (not ``(planned)``).

    A folder directly below the package is a room and stands for its ``__init__.py``; a folder inside a room ends in
    ``/`` and stands for all it holds.
    """
    found: dict[str, bool] = {}
    room = ""
    for line in drawn.splitlines()[1:]:
        name, _, about = line.strip().partition(" ")
        if not line.startswith("   "):
            room = name if name.endswith("/") else ""
            name = "__init__.py" if room else name
        found[room + name] = not about.strip().startswith("(planned)")
    return found


def off_the_map(package: Path, drawn: str) -> list[str]:
    """Files that the map does not name, and names on it that are no file."""
    files = {path.relative_to(package).as_posix() for path in package.rglob("*.py")} - {"__init__.py"}
    names = mapped(drawn)
    folders = tuple(name for name in names if name.endswith("/"))
    found = [
        f"{name}: on the map, not in the tree" if there else f"{name}: it is there; take (planned) off the map"
        for name, there in names.items()
        if (package / name).exists() != there
    ]
    found += [
        f"{file}: not on the map (one line in src/polar_env/__init__.py and in README.md)"
        for file in sorted(files - set(names))
        if not any(file.startswith(folder) for folder in folders)
    ]
    return found
