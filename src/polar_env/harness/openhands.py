"""OpenHands SDK (OpenAI Chat, not streaming): a launcher around its default kind of agent, and the ending it reports.

The SDK is a library, so our launcher is its command line: one agent with the terminal and the file editor, no user
skills, no condenser (a full context ends the run, and history is append-only until then). Its prompt names no day, no
host and no kernel. The launcher reads instruction and limits from a file and prints how the conversation ended.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from polar_env.config import HarnessConfig
from polar_env.harness import HOME, Job, Launch, Mount, Report
from polar_env.harness.install import OPT, find_python, install_python, python_mount
from polar_env.harness.reading import died, failure, last_event, string, tail, timeout
from polar_env.types import CallKind, HarnessExit, Outcome, WireApi

VERSION = "1.58.2"
OLDEST, NEWEST = 12, 14
"""Python 3.x it runs on (its own metadata: >= 3.12)."""

JOB_FILE = f"{HOME}/.polar/openhands.json"
LAUNCHER_FILE = f"{HOME}/.polar/openhands_launch.py"
KEY_VARIABLE = "POLAR_API_KEY"
EVENT = "polar.openhands.exit"
CONVERSATION_ID = "00000000-0000-4000-8000-000000000001"
"""The same in every rollout: it is in a header, and names files."""

LAUNCHER = f"""\
import json, os, sys, uuid
os.environ.pop("LD_LIBRARY_PATH", None)
key = os.environ.pop("{KEY_VARIABLE}")
sys.path.insert(0, "{OPT}/openhands/site")
from pydantic import SecretStr
from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.sdk.event.conversation_error import ConversationErrorEvent
from openhands.tools.file_editor import FileEditorTool
from openhands.tools.terminal import TerminalTool
with open("{JOB_FILE}", encoding="utf-8") as file:
    job = json.load(file)
fields = {{name: json.loads(value) for name, _, value in (each.partition("=") for each in sys.argv[1:])}}
llm = LLM(**{{**job["llm"], **fields}}, api_key=SecretStr(key))
tools = [Tool(name=TerminalTool.name, params={{"terminal_type": "subprocess"}}), Tool(name=FileEditorTool.name)]
conversation = Conversation(
    agent=Agent(llm=llm, tools=tools),
    workspace=job["workdir"],
    conversation_id=uuid.UUID("{CONVERSATION_ID}"),
    max_iteration_per_run=job["max_turns"],
    visualizer=None,
)
try:
    conversation.send_message(job["instruction"])
    conversation.run()
finally:
    events = list(conversation.state.events)
    errors = [event for event in events if isinstance(event, ConversationErrorEvent)]
    print()
    print(json.dumps({{
        "type": "{EVENT}",
        "status": conversation.state.execution_status.value,
        "code": errors[-1].code if errors else "",
        "error": errors[-1].detail if errors else "",
        "final_text": get_agent_final_response(events),
    }}), flush=True)
    conversation.close()
"""


class OpenHands:
    """OpenHands SDK at the version ``config.version`` (default: the pinned one).

    ``config.extra_args`` are fields of its LLM, as ``name=JSON``: ``temperature=0.5``, ``native_tool_calling=false``.
    """

    name = "openhands"
    wire = WireApi.CHAT
    enforces_turns = True

    def __init__(self, config: HarnessConfig) -> None:
        self._version = config.version or VERSION
        self._extra = config.extra_args

    async def install(self, store: Path) -> tuple[Mount, ...]:
        """A directory of Python packages (700 MB, litellm and all) and an interpreter to run them."""
        python = await find_python(self.name, OLDEST, NEWEST)
        packages = [f"openhands-{part}=={self._version}" for part in ("sdk", "tools")]
        label = f"{self.name}-{self._version}"
        root = await install_python(store, label, *packages, binary=python.binary, minor=python.minor)
        return (Mount(root, f"{OPT}/{self.name}"), python_mount(python.prefix))

    def launch(self, job: Job) -> Launch:
        env = {
            "HOME": HOME,
            KEY_VARIABLE: job.key,
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "OPENHANDS_SUPPRESS_BANNER": "1",
            "ALLOW_SHORT_CONTEXT_WINDOWS": "true",
            "LOG_LEVEL": "ERROR",
        }
        files = {JOB_FILE: _job(job), LAUNCHER_FILE: LAUNCHER.encode()}
        return Launch(argv=("/bin/sh", f"{OPT}/{self.name}/run", LAUNCHER_FILE, *self._extra), env=env, files=files)

    def classify(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> tuple[CallKind, str]:
        """Every call is the agent's own: without condenser and sub-agent tools there are no others."""
        return CallKind.AGENT, ""

    def read(self, exit: HarnessExit) -> Report:
        """By the line of the launcher."""
        ending = last_event(exit.stdout, EVENT)
        said = string(ending.get("final_text"))
        if exit.timed_out:
            return Report(Outcome.AGENT_TIMEOUT, timeout(self.name, exit), said)
        status, code = string(ending.get("status")), string(ending.get("code"))
        if status == "finished":
            return Report(Outcome.COMPLETED, "", said)
        if code == "MaxIterationsReached":
            return Report(Outcome.TURN_LIMIT, code, said)
        detail = f"{code or status}: {tail(string(ending.get('error')))}".rstrip(": ") if status else ""
        detail = detail or died(self.name, exit)
        return Report(failure(detail), detail, said)


def _job(job: Job) -> bytes:
    """What the launcher reads. The instruction is here: an argv would show and bound it."""
    facts = {
        "instruction": job.instruction,
        "workdir": job.workdir,
        "max_turns": job.max_turns,
        "llm": {
            "model": f"openai/{job.model}",
            "base_url": f"{job.base_url}/v1",
            "usage_id": "agent",
            "timeout": 3600,
            "max_input_tokens": job.context_window,
            "max_output_tokens": job.max_output_tokens,
        },
    }
    return json.dumps(facts).encode()
