"""A model call before it is sampled: what is asked, by whom, and which earlier call it carries on. Pure."""

import time
from dataclasses import dataclass

from polar_env.capture import judge
from polar_env.continuation import Place
from polar_env.types import CallKind, CallRecord, EngineReply, ModelRequest, Sampling


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as the session needs it: decoded, classified, timed, placed in the session's history."""

    request: ModelRequest
    kind: CallKind
    thread: str
    digest: str
    started: float
    place: Place

    @property
    def turn(self) -> bool:
        """A call of the agent itself, on its main thread."""
        return self.kind is CallKind.AGENT and not self.thread

    def record(self, session_id: str, call_id: str, index: int, sampling: Sampling, reply: EngineReply) -> CallRecord:
        """The call as it is committed, judged by the capture contract."""
        return CallRecord(
            call_id=call_id,
            session_id=session_id,
            index=index,
            kind=self.kind,
            wire=self.request.wire,
            thread=self.thread,
            body_digest=self.digest,
            turn=reply.turn,
            prompt_ids=reply.prompt_ids,
            sampled_ids=reply.sampled_ids,
            log_probs=reply.log_probs,
            policy_version=reply.policy_version,
            sampling=sampling,
            asked=self.request.asked,
            message_count=len(self.request.messages),
            started=self.started,
            ended=time.time(),
            holes=judge(call_id, reply),
            ignored=self.request.ignored,
            replaced=self.request.replaced,
            continues=self.place.call_id,
            spliced=reply.spliced,
            ids=reply.ids,
        )
