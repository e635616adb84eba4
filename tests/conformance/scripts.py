"""What the model says in the cases of the conformance table."""

import json
from dataclasses import replace

from cli_scripts_helpers import TASK, delegates
from polar_env.engine.scripts import Call, Scene, Turn, call, text_of

SUMMARY = "nothing else needs to be kept"
"""In the scripted engine's answer to a request for a summary."""


def parallel(scene: Scene) -> Turn:
    """Two commands in one turn, the first slower than the second."""
    if scene.step:
        return scene.finish("Both have run.")
    return Turn("Two at once.", (scene.shell("sleep 0.5; echo fir''st"), scene.shell("echo sec''ond")))


def odd_arguments(scene: Scene) -> Turn:
    """Spaces, escapes, keys in another order than the schema's, a number with an exponent: JSON a model may write."""
    if scene.step:
        return scene.finish("It has run.")
    return Turn("", (odd(scene, scene.shell("printf %s \"h\u00e9llo/\u2603\" | od -An -tx1 | tr -d ' '")),))


def odd(scene: Scene, call: Call) -> Call:
    tool = scene.tool(call.name.lower())
    wanted = tool["parameters"].get("properties", {}) if tool else {}
    pairs = [(name, json.dumps(value).replace("/", "\\/")) for name, value in call.arguments.items()]
    if wanted.get("timeout", {}).get("type") == "number":
        pairs.append(("timeout", "1.0e5"))
    members = " ,\n".join(f"  {json.dumps(name)} :   {value}" for name, value in reversed(pairs))
    return replace(call, raw=f"{{{members}\n}}")


def blank_text(scene: Scene) -> Turn:
    """White space beside a call."""
    return scene.finish("It has run.") if scene.step else Turn("  \n", (scene.shell("echo fir''st"),))


def fills(scene: Scene) -> Turn:
    """Long results until the history was summed up; then a word more."""
    if _summed_up(scene):
        return scene.finish("It is done.")
    return Turn("Once more.", (scene.shell(f"seq {scene.step} 4000"),))


def looks(scene: Scene) -> Turn:
    """Three commands and the end; after a summary, the end."""
    if scene.step >= 3 or _summed_up(scene):
        return scene.finish("It is done.")
    return Turn("Once more.", (scene.shell(f"yes 'some words of a long log' | head -n {1500 + scene.step}"),))


def _summed_up(scene: Scene) -> bool:
    return any(SUMMARY in text_of(message) for message in scene.request.messages)


def fails(scene: Scene) -> Turn:
    """A command that fails in words."""
    return scene.finish("It failed.") if scene.step else Turn("", (scene.shell("echo bro''ken >&2; exit 3"),))


def looks_at_a_picture(scene: Scene) -> Turn:
    """dot.png through the tool that shows files."""
    tool = scene.tool("view_image", "read_file", "read", "file_editor", "str_replace_editor")
    if scene.step or tool is None:
        return scene.finish("I have seen it.")
    offered = tool["parameters"]["properties"]
    given = {"command": "view"} if tool["name"].endswith("editor") else {}
    given |= dict.fromkeys(("file_path", "filePath", "absolute_path", "path"), "/testbed/dot.png")
    return Turn("", (call(tool, {name: value for name, value in given.items() if name in offered}),))


def shouts(scene: Scene) -> Turn:
    """The tool of toy_mcp, whatever the CLI makes of its name; Qwen Code has it looked for first."""
    named = [tool["name"] for tool in scene.request.tools if tool["name"].endswith("shout")]
    hidden, text = "mcp__toy__shout", {"text": "first"}
    calls = [Call(named[0], text)] if named else []
    if not named and scene.tool("tool_search") and scene.tool("tool_call"):
        search = Call("tool_search", {"query": f"select:{hidden}"})
        calls = [search, Call("tool_call", {"name": hidden, "arguments": text})]
    return Turn("", (calls[scene.step],)) if scene.step < len(calls) else scene.finish("I have shouted.")


def walks(scene: Scene) -> Turn:
    """One command after the other, for ever; words where the last message is its own side's."""
    if scene.request.messages[-1]["role"] == "assistant":
        return Turn("I have to stop here.")
    return Turn("", (scene.shell(f"echo step {scene.step}"),))


def delegates_twice(scene: Scene) -> Turn:
    """Two sub-agents are told the same, word for word, at the same time."""
    turn = delegates(scene)
    tool = scene.tool("agent", "task", "invoke_agent")
    return replace(turn, calls=turn.calls * 2) if tool and [c.name for c in turn.calls] == [tool["name"]] else turn


def spawns_twice(scene: Scene) -> Turn:
    """Codex: the same."""
    turn = spawns(scene)
    return replace(turn, calls=turn.calls * 2) if turn.calls and turn.calls[0].name.endswith("spawn_agent") else turn


def spawns(scene: Scene) -> Turn:
    """Codex: a sub-agent is spawned, waited for and has its say; then the end."""
    spawn, wait = scene.tool("multi_agent_v1__spawn_agent"), scene.tool("multi_agent_v1__wait_agent")
    said = [text_of(message) for message in scene.request.messages if message["role"] == "user"]
    if spawn is None or wait is None or any(TASK in text for text in said):
        return delegates(scene)
    # Not by the step: what a sub-agent reports comes as a user's message, at any time.
    made = [made["function"]["name"] for message in scene.request.messages for made in message.get("tool_calls", [])]
    if spawn["name"] not in made:
        return Turn("", (Call(spawn["name"], {"message": TASK}),))
    if wait["name"] not in made:
        results = [text_of(message) for message in scene.request.messages if message["role"] == "tool"]
        spawned = [json.loads(result)["agent_id"] for result in results]
        return Turn("", (Call(wait["name"], {"targets": spawned, "timeout_ms": 60000}),))
    return scene.finish("It is done.")
