"""The vLLM engine: a stock server's chat completions, with the exact ids and log-probs of what it sampled.

Serve with ``--enable-auto-tool-choice --tool-call-parser …``. Where the policy version comes from, best first: the
answer's own ``weight_versions`` (vLLM 0.33); ``GET /weight_info`` before and after the generation (0.32 in dev mode;
two versions are joined by ``+``: the weights changed in between); else the served model and the server's fingerprint,
which says which server it was and not which weights, as does the name of weights that no trainer ever set. A version
that the trainer declared (``fence``) is then better.

With ``--enable-scale-out`` a call that carries on an earlier one is *spliced* (``engine.splice``, ``vllm_splice``): its
prompt is that call's exact ids and a rendering of what is new, so no token of the history is spelled anew.
"""

import contextlib
from array import array
from collections import Counter
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, cast

import aiohttp

from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import EngineFacts, Session
from polar_env.engine.replicas import PROBE, Accepted, Replicas, addresses, agreed, chunks, parsed, root
from polar_env.engine.splice import Unspliceable
from polar_env.engine.vllm_splice import GENERATE, Plan, TokenRoute
from polar_env.engine.vllm_wire import Assembly, chat_body, prompt_body
from polar_env.errors import EngineError
from polar_env.messages import ChatMessage
from polar_env.types import Continuation, Delta, EngineReply, ModelRequest, Sampling, StopReason

_NO_IDS = array("i")

_NEVER_SET = "default"
"""vLLM's weight version until somebody sets one (vllm/v1/engine/core.py)."""


class VllmEngine:
    """One or more replicas of one served model. Hundreds of generations may run at once."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError when no server is configured."""
        self._config = config
        self._replicas = Replicas(config, addresses(config, "the vLLM server, such as http://host:8000/v1"))
        self._no_weight_info: set[str] = set()
        self._fingerprints: dict[str, str] = {}
        self._tokens = TokenRoute(self._replicas, config.stream)
        self.unspliced: Counter[str] = Counter()
        """Calls that carried on another and were rendered whole all the same, by reason."""

    # --- the protocol ------------------------------------------------------------------------------------------

    async def check(self) -> EngineFacts:
        """Prove every replica with two tiny generations. Raises EngineError naming the replica and what to change."""
        return agreed([await self._check_replica(base) for base in self._replicas.bases])

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """Deltas as they come, then the reply. Closing it closes the HTTP response, which aborts the generation."""
        order = self._replicas.order(session)
        plan = await self._plan(order, request, sampling, session)
        source = self._sample_behind(plan) if plan else self._sample(order, request, sampling, session)
        async with contextlib.aclosing(source) as parts:
            async for part in parts:
                yield part

    async def count_tokens(self, request: ModelRequest) -> int:
        """Prompt length by ``POST /tokenize`` of the first replica."""
        body = prompt_body(request, await self._replicas.served_model()) | {"add_generation_prompt": True}
        return int((await self._replicas.tokenized(self._replicas.bases[0], body))["count"])

    async def aclose(self) -> None:
        """Close every connection; generations still open end with EngineError."""
        await self._replicas.aclose()

    # --- one generation ----------------------------------------------------------------------------------------

    async def _sample(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        model = await self._replicas.served_model()
        body = chat_body(request, sampling, session.session_id, model, self._config.stream)
        answer = Assembly()
        async with (
            self._replicas.open(order, "/chat/completions", body, before=self._weight_version) as at,
            contextlib.aclosing(chunks(at.response)) as parts,
        ):
            async for chunk in parts:
                for delta in answer.feed(chunk):
                    yield delta
        if not answer.finished:
            raise EngineError(f"{at.base} ended its answer without a finish reason; look at the engine's log")
        version, told = await self._policy_version(at, model, answer)
        yield replace(answer.reply(version), versioned=told)

    async def _plan(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, session: Session
    ) -> Plan | None:
        """How to splice this call; ``None`` for one that carries on no other, or has to be rendered whole (counted)."""
        if request.continues is None or self._config.splice == "off":
            return None
        try:
            return await self._tokens.plan(order, request, sampling, session, await self._replicas.served_model())
        except Unspliceable as reason:
            self.unspliced[str(reason)] += 1
            return None

    async def _sample_behind(self, plan: Plan) -> AsyncGenerator[Delta | EngineReply, None]:
        """As ``_sample``, behind exact ids; the turn is shown when it is done."""
        server = root(plan.base)
        answer = Assembly(fingerprint=self._fingerprints.get(server, ""))
        async with (
            self._replicas.open((server,), GENERATE, plan.body, before=self._weight_version) as at,
            contextlib.aclosing(chunks(at.response)) as parts,
        ):
            async for chunk in parts:
                answer.feed(chunk)
        if not answer.finished:
            raise EngineError(f"{at.base} ended its answer without a finish reason; look at the engine's log")
        if answer.prompt_ids not in (_NO_IDS, plan.ids):
            raise EngineError(f"{at.base} says that it sampled behind other ids than it was given")
        for delta in answer.feed(await self._tokens.said(plan, answer)):
            yield delta
        if answer.fingerprint and answer.versions == [_NEVER_SET]:
            answer.versions.clear()  # 0.32 outside dev mode says so here and not of a chat: one name for one model
        version, told = await self._policy_version(at, plan.asked["model"], answer)
        yield replace(answer.reply(version), prompt_ids=plan.ids, versioned=told, spliced=True)

    async def _policy_version(self, at: Accepted, model: str, answer: Assembly) -> tuple[str, bool]:
        """(version, whether it says which weights sampled). See the module's docstring."""
        if answer.versions:
            return "+".join(answer.versions), set(answer.versions) != {_NEVER_SET}
        if at.before:
            after = await self._weight_version(at.base)
            version = at.before if after in ("", at.before) else f"{at.before}+{after}"
            return version, version != _NEVER_SET
        self._fingerprints[root(at.base)] = answer.fingerprint
        return f"{model}@{answer.fingerprint or 'unversioned'}", False

    async def _weight_version(self, base: str) -> str:
        """What ``GET /weight_info`` says; ``""`` where the server has no such route (asked once per replica)."""
        server = root(base)
        if server in self._no_weight_info:
            return ""
        try:
            async with self._replicas.http().get(server + "/weight_info") as response:
                found = parsed(await response.read()) if response.status == 200 else None
        except (aiohttp.ClientError, TimeoutError, OSError):
            return ""  # the generation itself will say what is wrong with this replica
        except EngineError:
            found = None
        version = cast("dict[str, Any]", found).get("weight_version") if isinstance(found, dict) else None
        if version is None:
            self._no_weight_info.add(server)
        return str(version or "")

    # --- the start-up proof ------------------------------------------------------------------------------------

    async def _check_replica(self, base: str) -> EngineFacts:
        card = await self._replicas.card(base, self._replicas.model)
        plain = await self._tiny(base, Sampling(temperature=1.0, top_p=1.0, max_tokens=8))
        if breaches := judge("check", plain):
            told = "; ".join(f"{hole.kind}: {hole.detail}" for hole in breaches)
            raise EngineError(
                f"{base} does not give what training needs ({told}); it must support return_token_ids and logprobs "
                "(vLLM 0.10.2 or newer), and --reasoning-parser needs include_reasoning left on"
            )
        greedy = await self._tiny(base, Sampling(temperature=1.0, top_k=1, max_tokens=8))
        certain = all(value == 0.0 for value in greedy.log_probs)
        note = (
            "log-probs are of the distribution sampled from (processed_logprobs)"
            if certain
            else "log-probs are the model's own, before temperature, top_p and top_k (raw_logprobs): "
            "sample with temperature 1 and top_p 1, or serve with --logprobs-mode processed_logprobs"
        )
        model, window = str(card["id"]), int(card.get("max_model_len") or self._config.max_model_len)
        notes = (note, await self._check_splice(base, model, window, plain))
        return EngineFacts(model, window, plain.policy_version, real_tensors=True, notes=notes)

    async def _check_splice(self, base: str, model: str, window: int, plain: EngineReply) -> str:
        """What is to be said about splicing on this replica. Raises EngineError when it must work and does not."""
        if self._config.splice == "off":
            return "prompts are rendered whole (engine.splice=off)"
        try:
            await self._tokens.prove(base, model, window)
            await self._try_splice(base, plain)
        except EngineError as error:
            self._tokens.forget(base)
            if self._config.splice == "on":
                raise EngineError(f"{base} cannot splice ({error}); {_SPLICE_REMEDY}") from error
            return f"{base} cannot splice, so its prompts are rendered whole ({error}); {_SPLICE_REMEDY}"
        return "a continued prompt begins with the exact ids of the call it carries on (splice)"

    async def _try_splice(self, base: str, plain: EngineReply) -> None:
        """One tiny generation behind ``plain``, judged. Raises EngineError."""
        said = ChatMessage(role="assistant", content=plain.turn.text)
        ids = plain.prompt_ids + plain.sampled_ids
        carried = Continuation("check", ids, messages=2, cut=plain.turn.stop is StopReason.LENGTH)
        request = replace(PROBE, messages=(*PROBE.messages, said, *PROBE.messages), continues=carried)
        sampling, session = Sampling(temperature=1.0, top_p=1.0, max_tokens=8), Session("check")
        plan = await self._tokens.plan((base,), request, sampling, session, await self._replicas.served_model())
        reply = await _last(self._sample_behind(plan), base)
        if breaches := judge("check", reply):
            raise EngineError("; ".join(f"{hole.kind}: {hole.detail}" for hole in breaches))

    async def _tiny(self, base: str, sampling: Sampling) -> EngineReply:
        return await _last(self._sample((base,), PROBE, sampling, Session("check")), base)


async def _last(source: AsyncGenerator[Delta | EngineReply, None], base: str) -> EngineReply:
    async with contextlib.aclosing(source) as parts:
        async for part in parts:
            if isinstance(part, EngineReply):
                return part
    raise EngineError(f"{base} gave no reply")


_SPLICE_REMEDY = "serve it with --enable-scale-out (vLLM 0.32 or newer)"
