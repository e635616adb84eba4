"""A proxy session without sockets, and the calls a harness makes in it."""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from typing import Any

from engine_helpers import BASH
from polar_env.capture import Ledger
from polar_env.config import ProxyConfig
from polar_env.engine import Engine
from polar_env.engine import Session as EngineSession
from polar_env.messages import ChatMessage
from polar_env.proxy.session import Session, policy
from polar_env.types import AssistantTurn, ModelRequest, WireApi
from proxy_helpers import classify


@asynccontextmanager
async def opened(
    engine: Engine,
    ledger: Ledger | None = None,
    *,
    script: str = "",
    volatile: Iterable[tuple[str, str, str]] = (),
    **config: Any,
) -> AsyncGenerator[Session]:
    """A session ``s`` whose generations live in a task group here. ``config`` sets ProxyConfig fields."""
    settings = ProxyConfig(**config)
    async with asyncio.TaskGroup() as group:
        session = Session(
            session_id="s",
            ledger=ledger or Ledger("s"),
            engine=engine,
            engine_session=EngineSession("s", script=script),
            classify=classify,
            sampling=policy(settings, None),
            config=settings,
            spawn=group.create_task,
            volatile=volatile,
        )
        try:
            yield session
        finally:
            await session.close()


async def turn(session: Session, *messages: ChatMessage, deliver: bool = True, thread: str = "") -> AssistantTurn:
    """One call, to its end."""
    body = {"messages": messages}
    request = ModelRequest(WireApi.CHAT, "any", messages, (BASH,))
    attempt = session.call(request, {"x-thread": thread}, body, repr(body).encode())
    with attempt.reading():
        said = await attempt.answer()
        if deliver:
            session.delivered(attempt)
        return said
