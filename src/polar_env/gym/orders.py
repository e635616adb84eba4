"""A trainer's orders to the rollouts of a server, here or on the workers of a cluster. No sockets.

    GET  /control/rollouts                           what is under way: task, group, index, session, stage, seconds
    POST /control/cancel   {"group": "7"}            end them now; answers when nothing of them runs
    POST /control/hurry    {"task": "x", "seconds": 60, "then": "mask"}   end them after so many more seconds of play

``cancel`` and ``hurry`` need at least one of ``task`` (its id), ``group`` (``_ng_task_index``) and ``session``; what is
given must all apply. Their rows are valid, masked and say why. ``hurry`` is what ``stragglers`` does by itself:
``then`` is ``mask``, or ``grade`` for what stands; a rollout that is being graded is left alone.

A server whose rollouts run on workers passes the order to every one of them; a list and a cancel then cover what no
worker had: rows that wait for a node, or whose node was lost. Those do not play, so no hurry means them.
"""

import json
import logging
from collections.abc import Mapping
from typing import Any, Protocol, cast

from polar_env.errors import BadRequest, GroupTimeout, PolarError, Straggler
from polar_env.gym.flights import Flights
from polar_env.gym.groups import Rest, chosen
from polar_env.proxy.control import fields_of

log = logging.getLogger(__name__)

ORDERS = {"GET /control/rollouts": "rollouts", "POST /control/cancel": "cancel", "POST /control/hurry": "hurry"}

Entries = list[dict[str, Any]]


class Obeys(Protocol):
    """Workers that take orders."""

    async def order(self, method: str, path: str, raw: bytes) -> tuple[int, dict[str, Any]]:
        """A trainer's order to every worker: (the worst HTTP status, {"nodes": worker -> what it said})."""
        ...


def order_of(method: str, path: str) -> str | None:
    """``rollouts``, ``cancel`` or ``hurry``; ``None``: no order to rollouts."""
    return ORDERS.get(f"{method} {path.rstrip('/')}")


async def answer(order: str, raw: bytes, flights: Flights, elsewhere: Obeys | None) -> tuple[int, dict[str, Any]]:
    """(HTTP status, JSON body) of an order."""
    try:
        fields = fields_of(raw)
        wanted = None if order == "rollouts" else chosen(fields)
        seconds, error = _hurry(fields) if order == "hurry" else (0.0, None)
    except BadRequest as refused:
        return 400, {"error": str(refused)}
    status, there = await _passed_on(order, raw, elsewhere)
    known = {entry["key"] for entry in there}
    if wanted is None:
        return status, {"rollouts": [*there, *(entry for entry in flights.told() if entry["key"] not in known)]}
    if error is None:
        reason = f"cancelled by the trainer's order ({', '.join(f'{k} {v}' for k, v in fields.items() if k != 'keys')})"
        here = await flights.cancel(wanted, reason, but=known)
        return status, {"cancelled": [*there, *here]}
    here = flights.hurry(wanted, seconds, error) if elsewhere is None else []
    return status, {"hurried": [*there, *here]}


async def hurry_elsewhere(rest: Rest, elsewhere: Obeys) -> None:
    """Tell the workers that the rest of a group has to come to an end."""
    then = "grade" if isinstance(rest.error, GroupTimeout) else "mask"
    told = {"keys": sorted(rest.keys), "seconds": rest.seconds, "then": then, "why": str(rest.error)}
    try:
        await elsewhere.order("POST", "/control/hurry", json.dumps(told).encode())
    except (PolarError, RuntimeError, OSError, ExceptionGroup):  # a hint that is lost must not end the server
        log.exception("hurrying the rest of a group")


async def _passed_on(order: str, raw: bytes, elsewhere: Obeys | None) -> tuple[int, Entries]:
    """(status, what the workers' rollouts are, each with its ``node``)."""
    if elsewhere is None:
        return 200, []
    method = "GET" if order == "rollouts" else "POST"
    status, said = await elsewhere.order(method, f"/control/{order}", raw)
    name = {"rollouts": "rollouts", "cancel": "cancelled", "hurry": "hurried"}[order]
    nodes = cast("Mapping[str, Mapping[str, Any]]", said.get("nodes", {}))
    return status, [{**entry, "node": node} for node, body in nodes.items() for entry in body.get(name, ())]


def _hurry(fields: Mapping[str, Any]) -> tuple[float, Straggler]:
    """(seconds, what then ends them). Raises BadRequest."""
    seconds, then = fields.get("seconds"), fields.get("then", "mask")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
        raise BadRequest("seconds must be a number, 0 or more: how long they may still play")
    if then not in ("mask", "grade"):
        raise BadRequest(f"then must be mask or grade, not {then!r}")
    why = str(fields.get("why") or f"the trainer gave it {seconds:g} more seconds")
    return float(seconds), (Straggler if then == "mask" else GroupTimeout)(why)
