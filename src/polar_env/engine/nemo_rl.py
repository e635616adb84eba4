"""The policy inside a NeMo-RL job: the HTTP endpoint of its vLLM workers (``vllm_cfg.expose_http_server``).

What that endpoint is (NeMo-RL 7ea279ab, ``nemo_rl/models/generation/vllm/vllm_worker_async.py``):

- one URL per data-parallel rank; ``/v1/chat/completions`` (line 731) and ``/tokenize`` at the root (line 846), nothing
  else, no key. There is no ``/v1/models``: a request without a model is taken as it stands.
- ``top_p`` must be there, (temperature, top_p) must be those of the training or the validation profile, and ``top_k``
  unset: assertions (lines 737-773), which reach a client as a bare 500.
- with ``logprobs`` and ``top_logprobs`` 0 (line 607), ids and log-probs are on ``choices[0].message`` of a whole answer
  (``vllm/utils.py``, lines 409-411); a stream carries none, so none is asked for.
- ``required_prefix_token_ids`` (line 584) become the beginning of the prompt: the worker renders the messages up to the
  last assistant's, counts end tokens, and puts the given ids in front of what follows (lines 520-562,
  ``openai_server_utils.py`` line 108). It does so whatever those messages say, so ids are sent only for a history that
  truly extends an earlier call (``request.continues``), and what came back is compared.
- whatever else it stumbles over is a bare 500 too (an image for a text model): see ``_again``.
- a prompt that does not fit is a 400 (line 785). ``max_tokens`` is clamped to the room left, never refused (line 437).
- nothing tells the weights' version: ``engine.policy_version``, or what the trainer declares (``fence``), does.
"""

from array import array
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any, cast

from polar_env.capture import judge
from polar_env.config import EngineConfig
from polar_env.engine import EngineFacts, Session
from polar_env.engine.replicas import PROBE, Replicas, ServerFailed, addresses, agreed, whole
from polar_env.engine.splice import shows_image
from polar_env.engine.vllm_wire import Assembly, chat_body, prompt_body
from polar_env.errors import EngineError, EngineRefused
from polar_env.messages import ChatMessage
from polar_env.types import Continuation, Delta, EngineReply, ModelRequest, Sampling

_NOT_ITS_OWN = ("return_token_ids", "return_weight_versions", "session_id", "top_k")
"""Fields of a plain vLLM request that this endpoint does not need or refuses."""

_NOTHING_ELSE = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Left out, they would come from the model's generation_config.json, as top_p would."""


class NemoRlEngine:
    """The workers of one NeMo-RL policy."""

    def __init__(self, config: EngineConfig) -> None:
        """Raises EngineError when no worker is configured."""
        wanted = "the workers' URLs, which NeMo-RL passes to Gym as policy_base_url"
        self._config = config
        self._replicas = Replicas(config, addresses(config, wanted))
        self._model = config.model

    async def check(self) -> EngineFacts:
        """Prove every worker with two tiny generations, one of them behind required ids.

        Raises EngineError naming the worker and what to change.
        """
        return agreed([await self._check_worker(base) for base in self._replicas.bases])

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """The whole turn at once, then the reply. Closing it closes the HTTP response, which aborts the generation."""
        order, prefix = self._replicas.order(session), self._prefix(request)
        try:
            answer, reply = await self._sample(order, request, sampling, prefix)
        except ServerFailed:
            answer, reply = await self._again(order, request, sampling)
        for delta in answer:
            yield delta
        yield reply

    async def count_tokens(self, request: ModelRequest) -> int:
        """Prompt length by ``POST /tokenize`` of the first worker."""
        return int((await self._tokenized(self._replicas.bases[0], request))["count"])

    async def aclose(self) -> None:
        """Close every connection; generations still open end with EngineError."""
        await self._replicas.aclose()

    # --- one generation ----------------------------------------------------------------------------------------

    async def _again(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling
    ) -> tuple[list[Delta], EngineReply]:
        """After a 500: once more, and rendered whole, as it may have been about the prefix, or have passed.

        Raises EngineRefused when it fails again and the worker is well: everything a worker stumbles over is a bare 500
        (measured: an image for a text model), and must not look like a dead engine, which would mask the rollout.
        """
        try:
            return await self._sample(order, request, sampling, None)
        except ServerFailed as error:
            try:
                await self._sample(order, PROBE, replace(sampling, max_tokens=1), None)
            except EngineError:
                raise error from None
            raise EngineRefused("the engine fails on this request and on no other") from error

    def _prefix(self, request: ModelRequest) -> "array[int] | None":
        """The ids that this request's prompt must begin with; ``None``: it is rendered whole.

        The worker joins them behind the *last* assistant's message, so that one must be theirs.
        """
        carried = request.continues
        if carried is None or self._config.splice == "off" or any(map(shows_image, request.messages)):
            return None
        last = max((at for at, one in enumerate(request.messages, 1) if one["role"] == "assistant"), default=0)
        return carried.ids if last == carried.messages < len(request.messages) else None

    async def _sample(
        self, order: tuple[str, ...], request: ModelRequest, sampling: Sampling, prefix: "array[int] | None"
    ) -> tuple[list[Delta], EngineReply]:
        body = self._body(request, sampling, prefix)
        async with self._replicas.open(order, "/chat/completions", body) as at:
            told = await whole(at)
        answer = Assembly()
        deltas = answer.feed(_as_vllm(told))
        if not answer.finished:
            raise EngineError(f"{at.base} answered without a finish reason; look at the worker's log")
        self._model = str(cast("dict[str, Any]", told).get("model") or self._model)
        reply = answer.reply(self._config.policy_version or f"{self._model}@unversioned")
        spliced = prefix is not None and reply.prompt_ids[: len(prefix)] == prefix
        return deltas, replace(reply, spliced=spliced, versioned=False)  # what a trainer declares outranks it

    def _body(self, request: ModelRequest, sampling: Sampling, prefix: "array[int] | None") -> dict[str, Any]:
        """Raises EngineError for sampling that no profile of NeMo-RL has."""
        if sampling.top_k not in (None, -1):
            raise EngineError(f"NeMo-RL samples without top_k, not {sampling.top_k}; unset proxy.top_k")
        body = chat_body(request, sampling, "", self._config.model, stream=False)
        body = {name: value for name, value in body.items() if name not in _NOT_ITS_OWN and value != ""}
        body |= {"temperature": _or_one(sampling.temperature), "top_p": _or_one(sampling.top_p)} | _NOTHING_ELSE
        return body if prefix is None else body | {"required_prefix_token_ids": prefix.tolist()}

    async def _tokenized(self, base: str, request: ModelRequest) -> dict[str, Any]:
        """Raises EngineError: not a worker's ``/tokenize``."""
        body = prompt_body(request, self._config.model) | {"add_generation_prompt": True}
        if not self._config.model:
            del body["model"]
        return await self._replicas.tokenized(base, body)

    # --- the start-up proof ------------------------------------------------------------------------------------

    async def _check_worker(self, base: str) -> EngineFacts:
        sampling = Sampling(self._config.check_temperature, self._config.check_top_p, max_tokens=8)
        window = (await self._tokenized(base, PROBE)).get("max_model_len") or self._config.max_model_len
        plain = await self._first(base, sampling)
        if breaches := judge("check", plain):
            told = "; ".join(f"{hole.kind}: {hole.detail}" for hole in breaches)
            raise EngineError(f"{base} does not give what training needs ({told}); is it a NeMo-RL worker of 2026?")
        declared = self._config.policy_version
        version = f"the policy version is declared: {declared}" if declared else _UNDECLARED
        notes = (await self._check_splice(base, plain, sampling), version)
        return EngineFacts(self._model, int(window), plain.policy_version, real_tensors=True, notes=notes)

    async def _first(self, base: str, sampling: Sampling) -> EngineReply:
        """A tiny generation. Raises EngineError, for a wrong profile with its remedy."""
        try:
            _, reply = await self._sample((base,), PROBE, sampling, None)
        except ServerFailed as error:
            asked = (_or_one(sampling.temperature), _or_one(sampling.top_p))
            raise EngineError(f"{error}; {_PROFILE.format(*asked)}") from error
        except EngineRefused as error:
            raise EngineError(f"{base} refused a plain question: {error}") from error
        return reply

    async def _check_splice(self, base: str, plain: EngineReply, sampling: Sampling) -> str:
        """Whether required ids come back as the prompt's beginning; ids that no rendering would give prove it.

        Raises EngineError when it must work and does not.
        """
        if self._config.splice == "off":
            return "prompts are rendered whole (engine.splice=off)"
        odd = plain.prompt_ids + plain.prompt_ids[:1] + plain.sampled_ids
        said = ChatMessage(role="assistant", content=plain.turn.text)
        request = replace(PROBE, messages=(*PROBE.messages, said, *PROBE.messages))
        request = replace(request, continues=Continuation("check", odd, messages=2))
        try:
            _, reply = await self._sample((base,), request, sampling, self._prefix(request))
            why = "" if reply.spliced else "the prompt does not begin with the required ids"
        except EngineError as error:
            why = str(error)
        if why and self._config.splice == "on":
            raise EngineError(f"{base} cannot splice ({why}); set engine.splice=off, or use a NeMo-RL of 2026")
        if why:
            return f"{base} cannot splice, so its prompts are rendered whole ({why})"
        return "a continued prompt begins with the exact ids (splice)"


def _or_one(value: float | None) -> float:
    """1.0 for what the session leaves open: it must be said, and a worker with another profile refuses it."""
    return 1.0 if value is None else value


def _as_vllm(answer: object) -> object:
    """A worker's whole answer with its tensors where vLLM has them. What is missing stays missing."""
    if not isinstance(answer, Mapping) or not isinstance(answer.get("choices"), list):
        return cast("object", answer)
    data = cast("Mapping[str, Any]", answer)
    choices = [cast("dict[str, Any]", choice) for choice in data["choices"] if isinstance(choice, Mapping)]
    messages: list[Mapping[str, Any]] = [choice.get("message") or {} for choice in choices]
    return {
        **data,
        "prompt_token_ids": messages[0].get("prompt_token_ids") if messages else None,
        "choices": [
            {
                **choice,
                "token_ids": message.get("generation_token_ids"),
                "logprobs": {"content": [{"logprob": value} for value in message.get("generation_log_probs") or ()]},
            }
            for choice, message in zip(choices, messages, strict=True)
        ],
    }


_PROFILE = (
    "a NeMo-RL worker answers 500 to sampling that is not its own: temperature {:g} and top_p {:g} were asked for; set "
    "engine.check_temperature and engine.check_top_p to policy.generation.temperature and .top_p of the recipe"
)
_UNDECLARED = "the endpoint tells no policy version: set engine.policy_version, or let the trainer declare it"
