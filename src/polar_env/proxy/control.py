"""A trainer's orders to the fence: what the control side of a process answers. No sockets.

It is never on a listener that a sandbox can reach, and has a secret of its own that no session is told.

    GET  /control                                    how the fence stands
    POST /control/pause    {"mode": "wait"}          wait | abort | keep; answers when none runs (keep: at once)
    POST /control/resume   {"version": "step-8"}     the version may be left out
    POST /control/abort                              stop what runs; answers when the engine was told
    POST /control/version  {"version": "step-8"}     name the weights without a pause

Each needs ``Authorization: Bearer <secret>`` and answers with ``engine.fence.FenceState``, or ``{"error": why}``. The
`polar` resources server takes orders to rollouts as well (``gym.orders``); a proxy alone has none.
"""

import hmac
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from polar_env.engine.fence import VERSION, Fence, FenceState, Pause
from polar_env.errors import BadRequest, boundary

SECRET = "POLAR_CONTROL_SECRET"
"""The variable that holds the secret, on both sides."""

_OF_ROLLOUTS = ("/control/rollouts", "/control/cancel", "/control/hurry")


def refusal(secret: str, authorization: str) -> tuple[int, dict[str, Any]] | None:
    """The answer to a request that may not give orders; ``None`` when it may. An empty ``secret`` lets nobody in."""
    if not secret:
        return 403, {"error": f"this process has no control secret: set {SECRET} where it starts"}
    if not authorization.removeprefix("Bearer").strip():
        return 401, {"error": f"no secret came with the order: set {SECRET} where you give it"}
    if not hmac.compare_digest(authorization.encode(errors="replace"), f"Bearer {secret}".encode()):
        return 401, {"error": "wrong secret: the control side has one of its own"}
    return None


async def answer(fence: Fence, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
    """(HTTP status, JSON body) of one request that was let in."""
    try:
        state = await _obey(fence, f"{method} {path.rstrip('/')}", fields_of(raw))
    except BadRequest as error:
        return 400, {"error": str(error)}
    if state is None:
        whose = "; rollouts are listed and cancelled at the polar server's door" if path in _OF_ROLLOUTS else ""
        return 404, {"error": f"no order {method} {path}{whose}"}
    return 200, asdict(state)


async def _obey(fence: Fence, order: str, fields: Mapping[str, Any]) -> FenceState | None:
    """Raises BadRequest for a mode or version that is none."""
    match order:
        case "GET /control":
            return fence.state
        case "POST /control/pause":
            return await fence.pause(_mode(fields))
        case "POST /control/resume":
            return fence.resume(_version(fields) if fields.get("version") is not None else None)
        case "POST /control/abort":
            return await fence.abort()
        case "POST /control/version":
            return fence.declare(_version(fields))
        case _:
            return None


def names(raw: bytes) -> str | None:
    """The version an order names, empty when it names none; ``None``: a fence refuses the order for what it says."""
    try:
        fields = fields_of(raw)
        _mode(fields)
        version = "" if fields.get("version") is None else _version(fields)
    except BadRequest:
        return None
    return version if not version or VERSION.fullmatch(version) else None


def fields_of(raw: bytes) -> Mapping[str, Any]:
    """An order's JSON. Raises BadRequest when it is no object."""
    with boundary(BadRequest, "reading the order"):
        fields = json.loads(raw or b"{}")
    if not isinstance(fields, dict):
        raise BadRequest("an order is a JSON object")
    return cast("dict[str, Any]", fields)


def _mode(fields: Mapping[str, Any]) -> Pause:
    mode = fields.get("mode", Pause.WAIT)
    if mode not in list(Pause):
        raise BadRequest(f"mode {mode!r} is none of {', '.join(Pause)}")
    return Pause(mode)


def _version(fields: Mapping[str, Any]) -> str:
    version = fields.get("version")
    if not isinstance(version, str):
        raise BadRequest("version must be a string, such as step-12")
    return version
