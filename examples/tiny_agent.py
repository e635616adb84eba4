"""A whole agent CLI in one file: what the `shell` harness needs, and nothing of polar_env.

    python examples/tiny_agent.py INSTRUCTION_FILE

It speaks OpenAI Chat to POLAR_BASE_URL with POLAR_API_KEY, offers one tool (bash), runs what the model calls, and
stops when the model calls nothing. Any command line like this one can be trained:
`polar rollout --harness shell 'harness.command=[python,/path/in/the/sandbox/tiny_agent.py,"{instruction_file}"]'`.
"""

import json
import os
import subprocess
import sys
import urllib.request

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a shell command in the repository.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def ask(messages):
    body = {"model": os.environ["POLAR_MODEL"], "messages": messages, "tools": [BASH]}
    request = urllib.request.Request(
        os.environ["POLAR_BASE_URL"] + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": "Bearer " + os.environ["POLAR_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]


def bash(arguments):
    command = json.loads(arguments)["command"]
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, errors="replace")
    return ran.stdout + ran.stderr


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        messages = [{"role": "user", "content": file.read()}]
    while True:
        reply = ask(messages)
        messages.append(reply)
        if not reply.get("tool_calls"):
            print(reply.get("content") or "")
            return
        for call in reply["tool_calls"]:
            result = bash(call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})


main()
