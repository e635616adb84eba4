"""What is kept of a rollout that did not complete, beside its session's log: enough to see why.

``ending.json`` says how it ended and what the harness printed last; ``patch.diff`` is what it had changed. Nothing that
trains reads them. The session's key is dead by then, and blotted out all the same.
"""

import json
from dataclasses import asdict
from pathlib import Path

from polar_env.errors import CaptureError, boundary
from polar_env.types import RolloutResult

PRINTED = 64 * 1024
"""Characters kept of the end of each output stream: the tail holds the error, and a thousand failures stay small."""


def keep(directory: Path, result: RolloutResult, key: str = "") -> Path:
    """Write the bundle into the session's ``directory`` and return the path of ``ending.json``. Blocks.

    Raises:
        CaptureError: it cannot be written.
    """
    ended = result.exit
    told = {
        "task_id": result.task_id,
        "harness": result.harness,
        "outcome": result.outcome.value,
        "detail": result.detail,
        "verdict": None if result.verdict is None else asdict(result.verdict),
        "egress": None if result.egress is None else asdict(result.egress),
        "seconds": dict(result.seconds),
        "exit": None
        if ended is None
        else asdict(ended) | {"stdout": ended.stdout[-PRINTED:], "stderr": ended.stderr[-PRINTED:]},
    }
    text = json.dumps(told, indent=2)
    path = directory / "ending.json"
    with boundary(CaptureError, f"keeping how {directory.name} ended"):
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(key, "<session key>") if key else text, encoding="utf-8")
        if result.patch:
            (directory / "patch.diff").write_bytes(result.patch)
    return path
