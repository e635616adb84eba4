"""Aider (OpenAI Chat, streaming): launch profile and the ending its launcher reports.

Aider offers the model no tools: it shows a map of the repository and the files named so far, and takes whole files (its
edit format for a model it does not know) out of the answer. One message makes one call, and up to three more when the
answer names files that were not shown or does not parse. It exits 0 on a failed call, so a small launcher runs it the
way its own ``--message-file`` does and prints how that ended. Its prompt names the day and the kernel release.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import OPT, find_python, install_python, python_mount
from polar_env.harness.reading import died, failure, last_event, string, system_text, tail, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "0.86.2"
OLDEST, NEWEST = 10, 12
"""Python 3.x it runs on (its own metadata: >= 3.10, < 3.13)."""

FOLDER = f"{HOME}/.polar/aider"
INSTRUCTION_FILE = f"{FOLDER}/instruction.md"
MODEL_FILE = f"{FOLDER}/model.json"
LAUNCHER_FILE = f"{FOLDER}/launch.py"
KEY_VARIABLE = "POLAR_API_KEY"
EVENT = "polar.aider.exit"

QUIET = (
    *("--yes-always", "--no-pretty", "--no-fancy-input", "--no-check-update", "--analytics-disable"),
    *("--no-show-release-notes", "--no-show-model-warnings", "--disable-playwright", "--no-detect-urls"),
    # Nothing of its own in the repository: no commits, no .gitignore lines, no chat history.
    *("--no-auto-commits", "--no-dirty-commits", "--no-gitignore"),
    *("--chat-history-file", f"{FOLDER}/chat.md", "--input-history-file", f"{FOLDER}/input"),
    # Its linter is a module of the interpreter, which it would start without the packages.
    "--no-auto-lint",
)

LAUNCHER = f"""\
import json, os, sys
os.environ.pop("LD_LIBRARY_PATH", None)
key = os.environ.pop("{KEY_VARIABLE}")
sys.path.insert(0, "{OPT}/aider/site")
from aider.main import main
from aider.repomap import RepoMap
RepoMap.TAGS_CACHE_DIR = "{FOLDER}/tags"
turns = int(sys.argv[1])
with open("{INSTRUCTION_FILE}", encoding="utf-8") as file:
    instruction = file.read()
coder = main(["--openai-api-key", key, *sys.argv[2:]], return_coder=True)
if not hasattr(coder, "run"):
    sys.exit(coder or 1)
errors = []
tell = coder.io.tool_error
def tool_error(message="", strip=True):
    errors.append(str(message))
    tell(message, strip)
coder.io.tool_error = tool_error
coder.max_reflections = min(coder.max_reflections, turns - 1)
status = "crashed"
try:
    coder.run(with_message=instruction, preproc=not instruction.startswith(("/", "!")))
    said = coder.partial_response_content or ""
    if coder.num_exhausted_context_windows:
        status = "length" if said else "overflow"
    elif not said:
        status = "no_answer"
    else:
        status = "unfinished" if coder.reflected_message else "done"
finally:
    print()
    print(json.dumps({{
        "type": "{EVENT}",
        "status": status,
        "error": errors[-1] if errors else "",
        "final_text": coder.partial_response_content or "",
    }}), flush=True)
"""

MARKS: tuple[tuple[str, CallKind], ...] = (
    ("*Briefly* summarize this partial conversation", CallKind.COMPACTION),
    ("You are an expert software engineer that generates concise, one-line Git commit messages", CallKind.SIDE),
)
"""First words of the system prompts of its other calls. Our profile makes none of them; ``extra_args`` may."""


class Aider:
    """Aider at the version ``config.version`` (default: the pinned one)."""

    name = "aider"
    wire = WireApi.CHAT
    enforces_turns = True

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """A directory of Python packages (700 MB, litellm and all) and an interpreter old enough to run them."""
        python = await find_python(self.name, OLDEST, NEWEST)
        label, package = f"{self.name}-{self._version}", f"aider-chat=={self._version}"
        root = await install_python(store, label, package, binary=python.binary, minor=python.minor)
        return (Mount(root, f"{OPT}/{self.name}"), python_mount(python.prefix))

    def launch(self, job: Job) -> Launch:
        argv = (
            *("/bin/sh", f"{OPT}/{self.name}/run", LAUNCHER_FILE, str(job.max_turns), "--model", f"openai/{job.model}"),
            *("--model-metadata-file", MODEL_FILE, "--timeout", "3600", *QUIET, *self._extra),
        )
        env = {
            "HOME": HOME,
            KEY_VARIABLE: job.key,
            "OPENAI_API_BASE": f"{job.base_url}/v1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            # After some errors it opens a web page about them.
            "BROWSER": "true",
        }
        files = {
            INSTRUCTION_FILE: job.instruction.encode(),
            MODEL_FILE: _model(job),
            LAUNCHER_FILE: LAUNCHER.encode(),
        }
        return Launch(argv=argv, env=env, files=files)

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """By the first words of the system prompt."""
        text = system_text(body)
        return next((kind for mark, kind in MARKS if text.startswith(mark)), CallKind.AGENT), ""

    def read(self, exit: HarnessExit) -> Report:
        """By the line of the launcher."""
        ending = last_event(exit.stdout, EVENT)
        said, status = string(ending.get("final_text")), string(ending.get("status"))
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        if status == "done":
            return Report(Outcome.COMPLETED, "", said)
        if status == "unfinished":
            return Report(Outcome.TURN_LIMIT, "it wanted another turn than its limit of reflections allows", said)
        error = tail(string(ending.get("error")))
        if status == "overflow":
            return Report(Outcome.CONTEXT_OVERFLOW, error or "the context window is full", said)
        detail = f"{status}: {error}".rstrip(": ") if status else died(self.name, exit)
        return Report(failure(detail), detail, said)


def _model(job: Job) -> bytes:
    """litellm's facts about the model, which Aider plans its prompt with."""
    facts = {
        "max_input_tokens": job.context_window,
        "max_output_tokens": job.max_output_tokens,
        "max_tokens": job.max_output_tokens,
        "litellm_provider": "openai",
        "mode": "chat",
    }
    return json.dumps({f"openai/{job.model}": facts}).encode()
