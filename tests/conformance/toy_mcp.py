"""An MCP server on standard input and output with one tool, ``shout``. Runs in the sandbox, on any Python 3."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
TOOL = {"name": "shout", "description": "Says it louder.", "inputSchema": SCHEMA}


def answer(method, params):
    if method == "initialize":
        version = params["protocolVersion"]
        return {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "toy", "version": "1"},
        }
    if method == "tools/list":
        return {"tools": [TOOL]}
    if method == "tools/call":
        return {"content": [{"type": "text", "text": params["arguments"]["text"].upper()}]}
    return {}


if __name__ == "__main__":
    for line in sys.stdin:
        asked = json.loads(line)
        if "id" in asked:
            result = answer(asked["method"], asked.get("params", {}))
            sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}) + "\n")
            sys.stdout.flush()
