"""Scripts for the real CLIs' own tools: their searches, their sub-agents."""

from polar_env.engine import scripts
from polar_env.engine.scripts import Scene, Turn, call

TASK = "SUBTASK: read hello.py and say what the greeting is."
ANSWER = "The greeting is helo."


def searches(scene: Scene) -> Turn:
    """Two searches at once, by content and by name, then the end."""
    by_content, by_name = scene.tool("grep", "grep_search"), scene.tool("glob")
    if scene.step or by_content is None or by_name is None:
        return scene.finish("I have searched.")
    return Turn("", (call(by_content, {"pattern": "helo"}), call(by_name, {"pattern": "**/*.py"})))


def delegates(scene: Scene) -> Turn:
    """The main agent gives TASK to a sub-agent and ends; the sub-agent runs a command and hands in ANSWER."""
    tool = scene.tool("agent", "task", "invoke_agent")
    said = [scripts.text_of(message) for message in scene.request.messages if message["role"] == "user"]
    if tool is None or TASK in said[0]:
        return _works(scene)
    if any(message.get("tool_calls") for message in scene.request.messages):
        return scene.finish("It is done.")
    wanted = {
        "description": "Look",
        "prompt": TASK,
        "subagent_type": "general-purpose" if tool["name"].lower() == "agent" else "general",
        "agent_name": "generalist",
    }
    return Turn("", (call(tool, {key: wanted[key] for key in wanted if key in tool["parameters"]["properties"]}),))


def _works(scene: Scene) -> Turn:
    if scene.step == 0:
        return Turn("", (scene.shell("cat hello.py"),))
    handing_in = scene.tool("complete_task")
    return Turn("", (call(handing_in, {"result": {"response": ANSWER}}),)) if handing_in else Turn(ANSWER)
