"""What the model says in the cases of the conformance table."""

import json
from dataclasses import replace

from cli_scripts_helpers import TASK, delegates
from polar_env.engine.scripts import Call, Scene, Turn, text_of

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


def spawns(scene: Scene) -> Turn:
    """Codex: a sub-agent is spawned, waited for and has its say; then the end."""
    spawn, wait = scene.tool("multi_agent_v1__spawn_agent"), scene.tool("multi_agent_v1__wait_agent")
    said = [text_of(message) for message in scene.request.messages if message["role"] == "user"]
    if spawn is None or wait is None or any(TASK in text for text in said):
        return delegates(scene)
    if scene.step == 0:
        return Turn("", (Call(spawn["name"], {"message": TASK}),))
    if scene.step == 1:
        spawned = json.loads(text_of(scene.request.messages[-1]))
        return Turn("", (Call(wait["name"], {"targets": [spawned["agent_id"]], "timeout_ms": 60000}),))
    return scene.finish("It is done.")
