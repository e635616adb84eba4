"""Changes to a test's source after which a right program fails it, and which still read as somebody's test. Pure.

Two kinds, because a package that forges results can be written against either alone. ``WRONG`` asks for what no program
gives (another number, another text, another exception): a package without the fix fails it too, so forcing or inverting
the result shows. ``OPPOSITE`` asks for the contrary (``==`` becomes ``!=``): a package without the fix passes it by
itself. Neither can be told from the real test by its form.
"""

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random


class Kind(StrEnum):
    WRONG = "wrong"
    OPPOSITE = "opposite"


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a test is defined: its class (empty for a plain function) and its name."""

    cls: str
    name: str


@dataclass(frozen=True, slots=True, order=True)
class Edit:
    """Bytes ``start`` to ``end`` of a file become ``text``."""

    start: int
    end: int
    text: str
    kind: Kind


Function = ast.FunctionDef | ast.AsyncFunctionDef

_OPPOSITES: Sequence[tuple[type[ast.cmpop], str, str]] = (
    (ast.Eq, r"==", "!="), (ast.NotEq, r"!=", "=="), (ast.NotIn, r"\bnot\s+in\b", "in"), (ast.In, r"\bin\b", "not in"),
    (ast.IsNot, r"\bis\s+not\b", "is"), (ast.Is, r"\bis\b", "is not"), (ast.LtE, r"<=", ">"), (ast.Lt, r"<", ">="),
    (ast.GtE, r">=", "<"), (ast.Gt, r">", "<="),
)  # fmt: skip
_PAIRS = {
    "assertEqual": "assertNotEqual", "assertTrue": "assertFalse", "assertIn": "assertNotIn", "assertIs": "assertIsNot",
    "assertIsNone": "assertIsNotNone", "assertIsInstance": "assertNotIsInstance", "assertGreater": "assertLessEqual",
    "assertLess": "assertGreaterEqual", "assertContains": "assertNotContains", "assertEquals": "assertNotEqual",
    "assertAlmostEqual": "assertNotAlmostEqual", "assertRegex": "assertNotRegex",
    "assertTemplateUsed": "assertTemplateNotUsed",
}  # fmt: skip
_METHODS = {b: a for a, b in _PAIRS.items() if a != "assertEquals"} | _PAIRS
_EXPECTING = re.compile(r"(^|\.)(raises\w*|assertRaises\w*)$")
_CHECKING = re.compile(r"(^|[._])(assert|check|raises|warns|expect|verify)", re.IGNORECASE)
_STRING = re.compile(r"^[bBuUrR]{0,2}(?P<quote>['\"])(?P<body>[^\\\n]*)(?P=quote)$", re.DOTALL)


class Source:
    """A test file: its functions, and where its lines start.

    Raises:
        SyntaxError: it is Python of another version. UnicodeDecodeError: not UTF-8.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        text = data.decode("utf-8")
        self._lines = [0]
        for line in data.split(b"\n"):
            self._lines.append(self._lines[-1] + len(line) + 1)
        self._tree = ast.parse(text)
        self.names = sorted(_bound(self._tree))

    def functions(self) -> dict[Place, list[Function]]:
        """Functions of the module and of its classes by place, not those inside functions. One defined twice (under
        two conditions) has two entries."""
        found: dict[Place, list[Function]] = {}
        for function, place in _defined(self._tree, ""):
            found.setdefault(place, []).append(function)
        return found

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        """Byte offsets of a node."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._lines[node.lineno - 1] + node.col_offset, self._lines[node.end_lineno - 1] + node.end_col_offset

    def text(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode("utf-8", "replace")

    def name_span(self, function: Function) -> tuple[int, int] | None:
        """Where the function's own name stands."""
        start, _ = self.span(function)
        match = re.match(rb"(?:async\s+)?def\s+(" + re.escape(function.name.encode()) + rb")\b", self.data[start:])
        return (start + match.start(1), start + match.end(1)) if match else None


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names a module binds at its top: imports, functions, classes."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names if alias.name != "*")
        elif isinstance(node, Function | ast.ClassDef) and not node.name.startswith("test"):
            yield node.name


def _defined(node: ast.AST, cls: str) -> Iterator[tuple[Function, Place]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child, Place(cls, child.name)
        else:
            yield from _defined(child, child.name if isinstance(child, ast.ClassDef) else cls)


def apply(data: bytes, edits: Sequence[tuple[int, int, str]]) -> bytes:
    """The file with these parts replaced; they must not overlap."""
    for start, end, text in sorted(edits, reverse=True):
        data = data[:start] + text.encode() + data[end:]
    return data


def edits(source: Source, function: Function, random: Random) -> list[Edit]:
    """What can be done to a test, each once, in random order within its rank: what an assertion compares with first,
    then what it asserts. Whether an edit is reached, only a run under the right fix can tell."""
    ranked: list[tuple[int, float, Edit]] = []
    for rank, edit in _edits(source, function, random):
        ranked.append((rank, random.random(), edit))
    return list(dict.fromkeys(edit for _, _, edit in sorted(ranked)))


def _edits(source: Source, function: Function, random: Random) -> Iterator[tuple[int, Edit]]:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            yield from ((1, edit) for edit in _opposite(source, node.test))
            yield from ((1, edit) for edit in _another(source, node.test))
            yield from _wrong(source, node.test, random)
        elif isinstance(node, ast.Call) and _CHECKING.search(name := ast.unparse(node.func)):
            yield from ((1, edit) for edit in _opposite_method(source, node.func))
            if name.rpartition(".")[2] in ("assertEqual", "assertEquals") and len(node.args) > 1:
                yield 1, _in_list(source, node.args[1])
            if _EXPECTING.search(name) and node.args:
                yield 0, _other_error(source, node.args[0], random)
            for argument in [*node.args, *(word.value for word in node.keywords)]:
                yield from _wrong(source, argument, random)


def _opposite(source: Source, test: ast.expr) -> Iterator[Edit]:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        start, end = source.span(test)
        word = re.match(rb"not\s*", source.data[start:end])
        yield Edit(start, start + len(word[0] if word else b""), "", Kind.OPPOSITE)
    elif isinstance(test, ast.Compare) and len(test.ops) == 1:
        start, end = source.span(test.left)[1], source.span(test.comparators[0])[0]
        gap = source.data[start:end].decode("utf-8", "replace")
        for kind, pattern, other in _OPPOSITES:
            if isinstance(test.ops[0], kind) and (match := re.search(pattern, gap)):
                at = start + len(gap[: match.start()].encode())
                yield Edit(at, at + len(match[0]), other, Kind.OPPOSITE)
    else:
        start, end = source.span(test)
        yield Edit(start, end, f"not ({source.text(test)})", Kind.OPPOSITE)


def _opposite_method(source: Source, called: ast.expr) -> Iterator[Edit]:
    if isinstance(called, ast.Attribute) and (other := _METHODS.get(called.attr)):
        _, end = source.span(called)
        yield Edit(end - len(called.attr), end, other, Kind.OPPOSITE)


def _another(source: Source, test: ast.expr) -> Iterator[Edit]:
    """Another thing than was asserted: a list of what was expected, ``None`` for what was to be true."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq):
        yield _in_list(source, test.comparators[0])
    elif isinstance(test, ast.Call | ast.Name | ast.Attribute):
        _, end = source.span(test)
        yield Edit(end, end, " is None", Kind.WRONG)


def _in_list(source: Source, value: ast.expr) -> Edit:
    start, end = source.span(value)
    return Edit(start, end, f"[{source.text(value)}]", Kind.WRONG)


def _other_error(source: Source, expected: ast.expr, random: Random) -> Edit:
    start, end = source.span(expected)
    said = source.text(expected)
    other = random.choice([name for name in ("BufferError", "FloatingPointError", "EOFError") if name not in said])
    return Edit(start, end, other, Kind.WRONG)


def _wrong(source: Source, value: ast.expr, random: Random) -> Iterator[tuple[int, Edit]]:
    """Other constants in what is compared. Those inside calls and subscripts are what the program is asked, not what
    it answers: a right program may well pass with another."""
    sides = [value.left, *value.comparators] if isinstance(value, ast.Compare) else [value]
    asked = (ast.Call, ast.Subscript, ast.JoinedStr)
    for side in sides:
        skipped = {id(inner) for node in ast.walk(side) if isinstance(node, asked) for inner in ast.walk(node)}
        for node in ast.walk(side):
            if isinstance(node, ast.Constant) and id(node) not in skipped:
                text = _other_constant(node.value, source.text(node), random)
                if text is not None:
                    yield 0, Edit(*source.span(node), text, Kind.WRONG)


def _other_constant(value: object, text: str, random: Random) -> str | None:
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, int) and text.isdigit():
        return str(value + random.randint(1, 3))
    if isinstance(value, float):
        return f"{value + random.randint(1, 3)!r}"
    match = _STRING.match(text)
    if not match or match["quote"] in match["body"]:
        return None
    letters = [at for at, letter in enumerate(match["body"]) if letter.isascii() and letter.isalpha()]
    if not letters:
        return None
    at = match.start("body") + random.choice(letters)
    return text[:at] + random.choice([c for c in "aeioustrnl" if c != text[at].lower()]) + text[at + 1 :]


def certain(source: Source, function: Function, random: Random) -> Edit:
    """An assertion at the head of the test that holds for no program, for tests nothing else can be done to: a name the
    file binds is not ``None``."""
    name = random.choice([name for name in source.names if name != function.name] or ["__name__"])
    first = function.body[0]
    if ast.get_docstring(function) is not None and len(function.body) > 1:  # unittest names a test by its docstring
        first = function.body[1]
    line = min([first.lineno, *(mark.lineno for mark in getattr(first, "decorator_list", ()))])
    start = source.span(first)[0] if line == first.lineno else source.span(_decorator(first))[0] - 1
    head = source.data.rfind(b"\n", 0, start) + 1
    before = source.data[head:start]
    if before.strip():  # the body stands on the line of its def
        return Edit(start, start, f"assert {name} is None; ", Kind.WRONG)
    return Edit(start, start, f"assert {name} is None\n{before.decode()}", Kind.WRONG)


def _decorator(node: ast.stmt) -> ast.expr:
    return min(getattr(node, "decorator_list", ()), key=lambda mark: mark.lineno)
