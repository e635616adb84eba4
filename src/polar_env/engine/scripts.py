"""Policies the scripted engine can play: from what a request offers and shows, the next assistant turn.

A script is a pure function of its ``Scene``. It keeps nothing between calls: where it stands is counted from the
conversation itself, so that a retried request gets the same answer and one engine serves every session.

Choose by name (``SCRIPTS``) or by dotted path ``package.module:callable`` for a policy of your own. One that has the
attribute ``without_tools`` is also asked when a harness offers no tools (Aider).
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from polar_env.engine import Session, patches
from polar_env.errors import EngineError, boundary
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import ModelRequest, StopReason

SHELLS = (
    "bash",
    "shell",
    "exec_command",
    "shell_command",
    "run_shell_command",
    "execute_bash",
    "terminal",
)
"""Shell tools by lower-case name: Claude Code ``Bash``, Codex ``exec_command`` or ``shell``, Pi and mini ``bash`` …"""

EDITORS = ("edit", "str_replace", "replace")
"""Tools that replace text in a file: Claude Code, Pi, Qwen Code and opencode ``edit``, Gemini CLI ``replace``."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""mini-swe-agent ends when exactly this is run as a tool call (its own interface, version 2.4)."""

_TEXT_ONLY = (
    "Respond with TEXT ONLY",
    "CONTEXT CHECKPOINT COMPACTION",
    "You are the component that summarizes a conversation",
)
"""Markers of a request that offers tools and must be answered in words: compaction in Claude Code, Codex, Qwen Code."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call to make; ``arguments`` are written as JSON in this order, or as ``raw`` spells them."""

    name: str
    arguments: Mapping[str, Any]
    raw: str = ""

    @property
    def written(self) -> str:
        return self.raw or arguments_json(self.arguments)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy says next. ``stop`` LENGTH cuts the turn before its end token; otherwise it follows the calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()
    reasoning: str = ""
    stop: StopReason | None = None


@dataclass(frozen=True, slots=True)
class Scene:
    """All a script may look at. ``step`` counts the assistant turns since the last user instruction."""

    request: ModelRequest
    session: Session
    step: int = field(default=0)

    @property
    def gold(self) -> tuple[patches.FilePatch, ...]:
        return patches.parse(self.session.gold_patch)

    def tool(self, *names: str) -> ToolSpec | None:
        """The first offered tool whose lower-case name is one of ``names``, in the order of ``names``."""
        offered = {tool["name"].lower(): tool for tool in reversed(self.request.tools)}
        return next((offered[name] for name in names if name in offered), None)

    def shell(self, command: str) -> Call:
        """``command`` as a call of the harness's own shell tool.

        Raises:
            EngineError: when the harness offers none.
        """
        tool = self.tool(*SHELLS)
        if tool is None:
            names = ", ".join(spec["name"] for spec in self.request.tools)
            raise EngineError(f"the scripted engine needs a shell tool and the harness offers only: {names}")
        wanted = _properties(tool)
        key = "cmd" if "cmd" in wanted else "command"
        listed = wanted.get(key, {}).get("type") == "array"
        return call(tool, {key: ["bash", "-lc", command] if listed else command})

    def finish(self, text: str) -> Turn:
        """End the task the way this harness ends: mini-swe-agent by its submit command, the others by words."""
        said = (text_of(message) for message in self.request.messages if message["role"] != "tool")
        if self.session.harness == "mini_swe_agent" or any(SUBMIT in each for each in said):
            return Turn(text, (self.shell(SUBMIT),))
        return Turn(text)


Script = Callable[[Scene], Turn]


def text_of(message: ChatMessage) -> str:
    """The text of a message, parts joined by newlines."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(str(part.get("text", "")) for part in content)


def _properties(tool: ToolSpec) -> dict[str, dict[str, Any]]:
    return cast("dict[str, dict[str, Any]]", tool["parameters"].get("properties", {}))


_BLANK: Mapping[str, Any] = {"boolean": False, "integer": 0, "number": 0, "array": [], "object": {}}


def call(tool: ToolSpec, arguments: Mapping[str, Any]) -> Call:
    """A call with every required argument present and keys in schema order (Claude Code re-orders them so)."""
    wanted = _properties(tool)
    filled = dict(arguments)
    for name in cast("list[str]", tool["parameters"].get("required", [])):
        filled.setdefault(name, _BLANK.get(str(wanted.get(name, {}).get("type")), "Run a command"))
    ordered = [name for name in wanted if name in filled] + [name for name in filled if name not in wanted]
    return Call(tool["name"], {name: filled[name] for name in ordered})


def step_of(messages: tuple[ChatMessage, ...]) -> int:
    """Assistant turns since the last user instruction; adjacent assistant messages are one turn.

    A user message right behind a tool result is the harness speaking (reminders), not a new instruction.
    """
    spoken = [message["role"] for message in messages if message["role"] not in ("system", "developer")]
    step, before = 0, ""
    for role in spoken:
        if role == "user" and before == "tool":
            continue
        if role == "user":
            step = 0
        elif role == "assistant" and before != "assistant":
            step += 1
        before = role
    return step


def play(name: str, request: ModelRequest, session: Session) -> Turn:
    """The next turn of script ``name``. Requests that want words only get words.

    Raises:
        EngineError: unknown script, no shell tool, no gold patch, or a user's script that failed.
    """
    script = resolve(name)
    wordy = getattr(script, "without_tools", False)
    if (not request.tools and not wordy) or request.tool_choice == "none" or _wants_words(request):
        return Turn(_words(request))
    scene = Scene(request, session, step_of(request.messages))
    with boundary(EngineError, f"playing the script {name!r}"):
        return script(scene)


def _wants_words(request: ModelRequest) -> bool:
    last = text_of(request.messages[-1]) if request.messages else ""
    return any(marker in last for marker in _TEXT_ONLY)


def _words(request: ModelRequest) -> str:
    """A side call's answer: a summary where one is asked for, else a line that serves as a title."""
    asked = " ".join(text_of(message) for message in request.messages[-1:]).lower()
    if any(word in asked for word in ("summar", "compact", "snapshot")):
        return "<summary>\nThe task is being worked on; nothing else needs to be kept.\n</summary>"
    return "Fix the reported problem"


def resolve(name: str) -> Script:
    """A script by table name or dotted path ``module:callable``. Raises EngineError that lists the names."""
    if name in SCRIPTS:
        return SCRIPTS[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise EngineError(f"unknown script {name!r}; write one of {', '.join(SCRIPTS)} or module:callable")
    try:
        return cast("Script", getattr(importlib.import_module(module), attribute))
    except (ImportError, AttributeError) as error:
        raise EngineError(f"script {name!r} cannot be imported: {error}") from error


# --- the policies -----------------------------------------------------------------------------------------------


def _look(scene: Scene) -> Turn:
    """Read the place the fix will touch, or the top of the tree when nothing is known of it."""
    command = "git status --short && ls"
    if scene.session.gold_patch:
        file = scene.gold[0]
        start = max(1, file.hunks[0].old_start - 5)
        command = f"sed -n '{start},{start + 40}p' {quote(file.path)}"
    return Turn("I will look at the code around the problem first.", (scene.shell(command),))


def quote(path: str) -> str:
    """A path for a POSIX shell, always quoted the same way."""
    return "'" + path.replace("'", "'\\''") + "'"


def apply_command(patch: str) -> str:
    """A shell command that applies ``patch`` at the top of the repository, which is where git runs an alias.

    Without ``$(...)``, and with the patch in quotes rather than in a heredoc: Gemini CLI 0.61.0 refuses commands that
    substitute, and takes any unquoted backtick for that (measured).
    """
    text = patch if patch.endswith("\n") else patch + "\n"
    return f"printf '%s' {quote(text)} | git -c alias.top='!git apply --whitespace=nowarn -' top"


def _apply(scene: Scene, patch: str, closing: str) -> Turn:
    """Look, apply ``patch``, show the change, finish."""
    match scene.step:
        case 0:
            return _look(scene)
        case 1:
            return Turn("Now I will change it.", (scene.shell(apply_command(patch)),))
        case 2:
            return Turn("Let me check the change.", (scene.shell("git --no-pager diff --stat"),))
        case _:
            return scene.finish(closing)


def fix(scene: Scene) -> Turn:
    """Apply the gold patch through the harness's shell tool."""
    if not scene.session.gold_patch.strip():
        raise EngineError(
            "the script `fix` needs the task's gold patch and the session has none: "
            "give it a task, or another script (engine.scripts=[give_up])"
        )
    return _apply(scene, scene.session.gold_patch, "The problem is fixed; the change is in the working tree.")


def half(scene: Scene) -> Turn:
    """Touch the right place without fixing it: a comment where the fix belongs. The tests keep failing for sure."""
    return _apply(scene, patches.comment_only(scene.gold), "I have noted where the change is needed.")


def partial(scene: Scene) -> Turn:
    """The gold patch less its last hunk. Usually too little; whether it is, the tests decide."""
    return _apply(scene, patches.without_last(scene.gold), "I have changed what I could find.")


def give_up(scene: Scene) -> Turn:
    """One look, then no edit at all."""
    if scene.step == 0:
        return Turn("I will look at the repository first.", (scene.shell("git status --short && ls"),))
    return scene.finish("I could not find the cause of the problem, so I have changed nothing.")


def think(scene: Scene) -> Turn:
    """``fix`` with reasoning on every turn; templates drop it after a new user message: a break on purpose."""
    return replace(fix(scene), reasoning=f"Step {scene.step}: decide what to do next.")


def silent(scene: Scene) -> Turn:
    """An empty answer."""
    return Turn()


def loop(scene: Scene) -> Turn:
    """A command for ever, a different one each time."""
    return Turn("", (scene.shell(f"echo step {scene.step}"),))


def long(scene: Scene) -> Turn:
    """Stops on length in the middle of a sentence."""
    return Turn(
        "I will now explain the whole repository, file by file, beginning with" + " the" * 40, (), "", StopReason.LENGTH
    )


def edit_tool(scene: Scene) -> Turn:
    """Apply the gold patch with the harness's own edit tool; with the shell where it has none."""
    plan = _edits(scene)
    if plan is None:
        return fix(scene)
    if scene.step == 0:
        return Turn("I will look at where I am.", (scene.shell("git rev-parse --show-toplevel"),))
    if scene.step <= len(plan):
        return Turn("", plan[scene.step - 1])
    return scene.finish("The problem is fixed with the edit tool.")


def _edits(scene: Scene) -> list[tuple[Call, ...]] | None:
    """The turns that edit, or ``None`` when no edit tool is offered."""
    patcher, editor, writer = scene.tool("apply_patch"), scene.tool(*EDITORS), scene.tool("write", "write_file")
    if patcher is not None:
        return [(call(patcher, {"input": envelope(scene.gold)}),)]
    if editor is None:
        return None
    root = _root(scene)
    reader = scene.tool("read", "read_file")
    turns = [] if reader is None else [_reads(reader, root, scene.gold)]
    for file in scene.gold:
        path = f"{root}/{file.path}"
        if file.created and writer is not None:
            turns.append((_write(writer, path, "".join(hunk.new for hunk in file.hunks)),))
        else:
            turns.extend((_edit(editor, path, hunk.old, hunk.new),) for hunk in file.hunks)
    return [turn for turn in turns if turn]


def _root(scene: Scene) -> str:
    """The repository's absolute path, as the first tool result of this script showed it."""
    results = [text_of(message) for message in scene.request.messages if message["role"] == "tool"]
    lines = [line.removeprefix("Output:").strip() for result in results for line in result.splitlines()]
    return next((line for line in lines if line.startswith("/")), ".")


def _path_key(tool: ToolSpec) -> str:
    return next((name for name in ("file_path", "path", "filePath") if name in _properties(tool)), "path")


def _reads(tool: ToolSpec, root: str, files: tuple[patches.FilePatch, ...]) -> tuple[Call, ...]:
    """Claude Code refuses to edit a file it has not read."""
    return tuple(call(tool, {_path_key(tool): f"{root}/{file.path}"}) for file in files if not file.created)


def _write(tool: ToolSpec, path: str, content: str) -> Call:
    return call(tool, {_path_key(tool): path, "content": content})


def _edit(tool: ToolSpec, path: str, old: str, new: str) -> Call:
    """One replacement, in the words of the tool at hand: two strings by one of three names, or a list of ``edits``."""
    wanted = _properties(tool)
    if "edits" in wanted:
        return call(tool, {_path_key(tool): path, "edits": [{"oldText": old, "newText": new}]})
    pairs = (("old_string", "new_string"), ("oldString", "newString"), ("oldText", "newText"))
    before, after = next((pair for pair in pairs if pair[0] in wanted), pairs[-1])
    return call(tool, {_path_key(tool): path, before: old, after: new})


def envelope(files: tuple[patches.FilePatch, ...]) -> str:
    """The patch in Codex's ``apply_patch`` form: *** Begin Patch, one section per file, *** End Patch."""
    lines = ["*** Begin Patch"]
    for file in files:
        verb = "Add" if file.created else "Delete" if file.deleted else "Update"
        lines.append(f"*** {verb} File: {file.path}")
        for hunk in () if file.deleted else file.hunks:
            lines.extend([] if file.created else ["@@"])
            lines.extend(line for line in hunk.lines if not line.startswith("\\"))
    return "\n".join([*lines, "*** End Patch"]) + "\n"


SCRIPTS: dict[str, Script] = {
    "fix": fix,
    "give_up": give_up,
    "half": half,
    "partial": partial,
    "think": think,
    "silent": silent,
    "loop": loop,
    "long": long,
    "edit_tool": edit_tool,
}


def arguments_json(arguments: Mapping[str, Any]) -> str:
    """Arguments as the template's ``tojson`` writes them, so that a re-rendered call has the sampled ids."""
    return json.dumps(arguments, ensure_ascii=False)
