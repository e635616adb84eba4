"""The scripted engine: a policy in Python behind a real tokenizer and a real chat template. Demo and tests.

What is real: the prompt ids (the request, rendered) and the sampled ids (the turn, tokenised in the template's own
format). A call that carries on an earlier one is spliced (``splice``), where the template proves that it can be.
What is declared: the log-probabilities. They are a fixed function of id and position, finite and negative,
and come from no model; ``EngineFacts.real_tensors`` says so wherever results are shown.
"""

import asyncio
import hashlib
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polar_env.config import EngineConfig, StoreConfig
from polar_env.engine import EngineFacts, Session, scripts, tokenizer
from polar_env.engine.splice import Splicer, Unspliceable, prove
from polar_env.errors import EngineError, EngineOverflow
from polar_env.messages import ChatMessage, ToolSpec
from polar_env.types import (
    AssistantTurn,
    Delta,
    EngineReply,
    ModelRequest,
    Sampling,
    StopReason,
    ToolCall,
    Usage,
    WireApi,
)

POLICY_VERSION = "scripted"

_CALL_OPEN, _CALL_CLOSE = "<tool_call>", "</tool_call>"
_PIECE = 48
"""Characters of a streamed fragment: several per turn, as a model would send."""


def declared_log_probs(ids: "array[int]") -> "array[float]":
    """Log-probabilities [S] for ``ids`` [S]: in [-2, -0.001], by hashing id and position. Declared, not computed."""
    positions = np.arange(len(ids), dtype=np.uint64)
    mixed = (np.asarray(ids, dtype=np.uint64) * 2654435761 + positions * 40503 + 12345) % 2000
    return array("f", (-(mixed.astype(np.float32) + 1) / 1000).tobytes())


@dataclass(frozen=True, slots=True)
class _Sampled:
    """A turn as tokens: ``ids`` end with the end token or are cut; ``text`` is what they spell before a tool call."""

    turn: scripts.Turn
    text: str
    ids: "array[int]"
    cut: bool


class ScriptedEngine:
    """Plays ``session.script`` (or the first of ``config.scripts``) on the session's conversation."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = asyncio.Lock()
        self._tokenizer: tokenizer.Tokenizer | None = None
        self._splicer: Splicer | Unspliceable | None = None
        self.unspliced: Counter[str] = Counter()
        """Calls that carried on another and were rendered whole, by why they could not be spliced."""

    async def _load(self) -> tokenizer.Tokenizer:
        """The tokenizer of the configuration; without one, the pinned Qwen3 tokenizer in the default cache."""
        async with self._lock:
            if self._tokenizer is None:
                directory = self._config.tokenizer or await asyncio.to_thread(tokenizer.fetch, StoreConfig().cache)
                self._tokenizer = await asyncio.to_thread(tokenizer.load, directory)
        return self._tokenizer

    async def _proof(self) -> Splicer | Unspliceable:
        """How prompts are spliced, or why none is."""
        if self._splicer is None:
            words = await self._load()
            if self._config.splice == "off":
                self._splicer = Unspliceable("engine.splice is off")
            else:
                self._splicer = await _prove_spliceable(words)
        return self._splicer

    async def check(self) -> EngineFacts:
        """Prove that the template re-renders a played turn to the very ids that were sampled.

        Raises:
            EngineError: a template that is not of the hermes form (Qwen2.5, Qwen3), an unknown script, no tokenizer;
                ``engine.splice`` is ``on`` and the template cannot be spliced.
        """
        for name in self._config.scripts:
            scripts.resolve(name)
        words = await self._load()
        await asyncio.to_thread(_prove_stable, words)
        proof = await self._proof()
        if self._config.splice == "on" and isinstance(proof, Unspliceable):
            raise EngineError(f"this template cannot be spliced: {proof}; set engine.splice to auto or off") from proof
        notes = (
            "log-probabilities are declared by the scripted engine, not computed by a model; ids are real",
            f"no splicing: {proof}" if isinstance(proof, Unspliceable) else "prompts are spliced (template proved)",
        )
        return EngineFacts(self._config.model or "scripted", self._config.max_model_len, POLICY_VERSION, False, notes)

    async def generate(
        self, request: ModelRequest, sampling: Sampling, session: Session
    ) -> AsyncGenerator[Delta | EngineReply, None]:
        """Play one turn. Raises EngineOverflow when the prompt leaves no room, EngineError when no turn can be made."""
        words = await self._load()
        prompt, spliced = await self._prompt(words, request)
        room = self._room(len(prompt), sampling)
        turn = scripts.play(session.script or self._config.scripts[0], request, session)
        sampled = await asyncio.to_thread(_sample, words, turn, room)
        reply = replace(_reply(prompt, sampled), spliced=spliced)
        for delta in _deltas(reply.turn):
            yield delta
            await asyncio.sleep(0)
        yield reply

    async def _prompt(self, words: tokenizer.Tokenizer, request: ModelRequest) -> tuple["array[int]", bool]:
        """Prompt ids [P], and whether they begin with those of the call the request carries on."""
        if request.continues is not None:
            proof = await self._proof()
            try:
                if isinstance(proof, Splicer):
                    return await proof.prompt(request), True
            except Unspliceable as why:
                proof = why
            self.unspliced[str(proof)] += 1
        return await asyncio.to_thread(words.render, request.messages, request.tools), False

    def _room(self, prompt: int, sampling: Sampling) -> int:
        """Tokens that may still be sampled; the words of the overflow are those vLLM uses."""
        window = self._config.max_model_len
        if prompt >= window:
            raise EngineOverflow(
                f"This model's maximum context length is {window} tokens. "
                f"However, your request has {prompt} input tokens."
            )
        return min(window - prompt, sampling.max_tokens or window)

    async def count_tokens(self, request: ModelRequest) -> int:
        words = await self._load()
        return len(await asyncio.to_thread(words.render, request.messages, request.tools))

    async def aclose(self) -> None:
        """Nothing is held open."""


def spell(turn: scripts.Turn) -> str:
    """The turn in the hermes form of the Qwen templates, up to and without the end token."""
    thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
    calls = [
        f'{_CALL_OPEN}\n{{"name": "{call.name}", "arguments": {call.written}}}\n{_CALL_CLOSE}' for call in turn.calls
    ]
    return thought + "\n".join([turn.text, *calls] if turn.text else calls)


def _sample(words: tokenizer.Tokenizer, turn: scripts.Turn, room: int) -> _Sampled:
    """Tokenise the turn, with its end token, and cut it to ``room`` tokens as an engine would."""
    ids = words.encode(spell(turn))
    if turn.stop is not StopReason.LENGTH:
        ids.extend(words.encode(words.eos))
    if len(ids) <= room and turn.stop is not StopReason.LENGTH:
        return _Sampled(turn, turn.text, ids, cut=False)
    ids = ids[:room]
    said = words.decode(ids).split("</think>\n\n")[-1].partition(_CALL_OPEN)[0].rstrip("\n")
    return _Sampled(turn, said, ids, cut=True)


def _reply(prompt: "array[int]", sampled: _Sampled) -> EngineReply:
    calls = () if sampled.cut else _calls(prompt, sampled)
    stop = StopReason.LENGTH if sampled.cut else StopReason.TOOL_CALLS if calls else StopReason.STOP
    turn = AssistantTurn(
        text=sampled.text,
        tool_calls=calls,
        stop=stop,
        usage=Usage(len(prompt), len(sampled.ids)),
        reasoning=sampled.turn.reasoning,
    )
    return EngineReply(
        turn=turn,
        prompt_ids=prompt,
        sampled_ids=sampled.ids,
        log_probs=declared_log_probs(sampled.ids),
        policy_version=POLICY_VERSION,
        finish=stop.value,
        versioned=False,
    )


def _calls(prompt: "array[int]", sampled: _Sampled) -> tuple[ToolCall, ...]:
    """Ids come from the tokens before and in the turn: unique in a session, the same again for a retry."""
    digest = hashlib.sha256(prompt.tobytes() + sampled.ids.tobytes())
    return tuple(
        ToolCall(
            f"call_{hashlib.sha256(digest.digest() + bytes([index])).hexdigest()[:24]}",
            call.name,
            call.written,
        )
        for index, call in enumerate(sampled.turn.calls)
    )


def _deltas(turn: AssistantTurn) -> list[Delta]:
    deltas = [Delta("reasoning", piece) for piece in _pieces(turn.reasoning)]
    deltas += [Delta("text", piece) for piece in _pieces(turn.text)]
    for index, call in enumerate(turn.tool_calls):
        deltas.append(Delta("tool_open", index=index, id=call.id, name=call.name))
        deltas += [Delta("tool_args", piece, index=index) for piece in _pieces(call.arguments)]
    return deltas


def _pieces(text: str) -> list[str]:
    return [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]


async def _prove_spliceable(words: tokenizer.Tokenizer) -> Splicer | Unspliceable:
    async def render(messages: Sequence[ChatMessage], tools: Sequence[ToolSpec]) -> "array[int]":
        return await asyncio.to_thread(words.render, messages, tools)

    try:
        return await prove(render)
    except Unspliceable as why:
        return why


def _prove_stable(words: tokenizer.Tokenizer) -> None:
    """Two turns of a tool conversation: the second prompt must start with the first prompt and what was sampled."""
    tool = ToolSpec(name="bash", parameters={"type": "object", "properties": {"command": {"type": "string"}}})
    asked = ModelRequest(WireApi.CHAT, "check", (ChatMessage(role="user", content="List the files."),), (tool,))
    first = words.render(asked.messages, asked.tools)
    said = scripts.Turn("I will look.", (scripts.Call("bash", {"command": 'echo "ü"\nls'}),))
    reply = _reply(first, _sample(words, said, 10_000))
    again = words.render((*asked.messages, *history(reply.turn, ("a.py",))), asked.tools)
    seen = first + reply.sampled_ids
    if again[: len(seen)] != seen:
        raise EngineError(
            "the chat template does not re-render a tool call as the hermes text it was sampled in; "
            "use a Qwen2.5 or Qwen3 tokenizer directory for the scripted engine"
        )


def history(turn: AssistantTurn, results: tuple[str, ...] = ()) -> tuple[ChatMessage, ...]:
    """The turn and its tool results as the next request's messages: what a faithful harness sends back."""
    said = ChatMessage(role="assistant", content=turn.text)
    if turn.reasoning:
        said["reasoning_content"] = turn.reasoning
    if turn.tool_calls:
        said["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in turn.tool_calls
        ]
    answers = [
        ChatMessage(role="tool", tool_call_id=call.id, content=result)
        for call, result in zip(turn.tool_calls, results, strict=False)
    ]
    return (said, *answers)
