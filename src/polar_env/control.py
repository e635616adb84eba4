"""A trainer's side of the fence: orders to a polar process over HTTP. Standard library only, no event loop needed.

    from polar_env.control import send

    send(url, secret, "pause", mode="abort")       # returns when no generation runs
    ...                                            # swap the weights
    send(url, secret, "resume", version="step-8")

``url`` is what `polar proxy --control-port` says, or that of the `polar` resources server in NeMo Gym. A process holds
only its own sessions: send the order to each.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any, cast

from polar_env.errors import ConfigError

ORDERS = ("state", "pause", "resume", "abort", "version", "rollouts", "cancel")
"""What a door answers. The last two are of the `polar` server only: what is under way, and ending some of it."""

ASKED = {"state": "", "rollouts": "/rollouts"}
"""Orders that only ask, and their place below ``/control``."""

FIELDS = {
    "pause": ("mode",),
    "resume": ("version",),
    "version": ("version",),
    "cancel": ("task", "group", "session"),
}
"""What may be said with an order."""


def send(url: str, secret: str, order: str, *, timeout: float | None = None, **fields: str | None) -> dict[str, Any]:
    """Give one order and return how the fence stands after it (``engine.fence.FenceState`` as JSON).

    Args:
        url: ``http://host:port`` of the control door.
        secret: the door's own.
        order: one of ``ORDERS``.
        timeout: seconds of silence after which the caller gives up; an order that was given stays given. ``None``:
            wait, as ``pause`` may for as long as a generation takes.
        fields: ``mode`` of ``pause`` (wait, abort, keep), ``version`` of ``resume`` and ``version``; of ``cancel``
            ``task``, ``group`` (its ``_ng_task_index``) and ``session``: it ends the rollouts that all those given fit.

    Raises:
        ConfigError: the order takes no such field, the door cannot be reached, or refuses (a wrong secret, an unknown
            mode); its words say which.
    """
    said = {name: value for name, value in fields.items() if value is not None}
    _check(order, said)
    where = f"{url.rstrip('/')}/control{ASKED.get(order, f'/{order}')}"
    body = None if order in ASKED else json.dumps(said).encode()
    if not where.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no address of a control door; write http://host:port")
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"}
    request = urllib.request.Request(where, body, headers)  # noqa: S310 - http(s), see above
    try:
        with urllib.request.urlopen(request, timeout=timeout) as response:  # noqa: S310
            return cast("dict[str, Any]", json.load(response))
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(f"{where} answered {error.code}: {_told(error.read())}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(
            f"{where} cannot be reached ({error}); is polar running, with its control door open?"
        ) from error


def _check(order: str, said: Mapping[str, str]) -> None:
    """Raises ConfigError for what was said with an order that it does not take, or is missing."""
    takes = FIELDS.get(order, ())
    for name, value in said.items():
        if name not in takes:
            takes_only = f"takes only {', '.join(takes)}" if takes else "takes nothing else"
            raise ConfigError(f"{order} takes no {name} ({value!r}): it {takes_only}")
    if order == "version" and "version" not in said:
        raise ConfigError("version needs the name of the weights, such as step-12")
    if order == "cancel" and not said:
        raise ConfigError("cancel needs a task, a group or a session: `rollouts` lists them")


def _told(raw: bytes) -> str:
    """The door's own words, or what it sent instead."""
    try:
        return str(json.loads(raw)["error"])
    except (ValueError, KeyError, TypeError):
        return raw[:200].decode("utf-8", "replace")
