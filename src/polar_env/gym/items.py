"""One model call as the output items of a Responses answer, and what stands for a rollout that must not train. Pure."""

import re
from array import array
from typing import Any

from polar_env.gym.contract import LEAKS, TOKEN_KEYS, markup
from polar_env.types import AssistantTurn, ChainTurn, RolloutResult, StopReason

THINKING = re.compile(r"<think>(.*?)</think>", re.DOTALL)


def items(turn: ChainTurn, said: AssistantTurn, *, with_ids: bool) -> list[dict[str, Any]]:
    """One call as output items: reasoning, message, function calls; a trained call's ids sit on the last.

    A thought that NeMo-RL would punish where the ids are (rule 11) does not carry them: an empty message does.
    """
    text, leaked = _split(said.text)
    status = "incomplete" if said.stop in (StopReason.LENGTH, StopReason.ABORT) else "completed"
    thoughts = [thought for thought in (said.reasoning, *leaked) if thought]
    made = [_reasoning(f"rs_{turn.call_id}_{i}", thought) for i, thought in enumerate(thoughts)]
    if text or not (said.tool_calls or (thoughts and not markup(thoughts[-1:]))):
        made.append(_message(f"msg_{turn.call_id}", text, status))
    for tool in said.tool_calls:
        named = {"id": f"fc_{turn.call_id}_{tool.id}", "call_id": tool.id, "name": tool.name}
        fields = {key: clean(value) for key, value in {**named, "arguments": tool.arguments}.items()}
        made.append({"type": "function_call", **fields, "status": status})
    if with_ids and turn.trained:
        made[-1] |= dict(zip(TOKEN_KEYS, (turn.prompt_ids, turn.sampled_ids, turn.log_probs), strict=True))
    return made


def _reasoning(item_id: str, text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": item_id, "summary": [{"type": "summary_text", "text": clean(text)}]}


def _message(item_id: str, text: str, status: str = "completed") -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": clean(text), "annotations": []}
    return {"type": "message", "id": item_id, "role": "assistant", "status": status, "content": [part]}


def _split(text: str) -> tuple[str, list[str]]:
    """(text that may stand in a message, what leaked into it) when the engine's parser left markup behind (rule 11)."""
    thoughts = [thought.strip() for thought in THINKING.findall(text)]
    rest = THINKING.sub("", text)
    if "</think>" in rest:  # the template opened the block, so the model only closed it
        before, _, rest = rest.rpartition("</think>")
        thoughts.append(before.strip())
    at = min((rest.find(leak) for leak in LEAKS if leak in rest), default=len(rest))
    return rest[:at], [*thoughts, rest[at:]]


def clean(text: str) -> str:
    """``text`` without lone surrogates: Gym's orjson refuses them, and one refused row ends the batch."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def placeholder(result: RolloutResult) -> dict[str, Any]:
    """One masked token behind one prompt token: a valid row that no sibling's baseline counts (rule 5).

    The token is the first of the rollout's own first prompt (0 when nothing was captured); it was not sampled, and
    both masks are set wherever it appears.
    """
    first = next((record.prompt_ids[0] for record in result.ledger.records if record.prompt_ids), 0)
    tensors = array("i", [first]), array("i", [first]), array("f", [0.0])
    return _message("msg_placeholder", "") | dict(zip(TOKEN_KEYS, tensors, strict=True))
