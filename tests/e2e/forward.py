"""Log-probabilities by a forward pass of the model itself, without vLLM: what a trainer would recompute.

Runs in the vLLM environment: python forward.py MODEL_DIR < ROWS > LOGPROBS. ROWS is a JSON list of ``{"ids": [T], "at":
[N]}``; the answer a JSON list of [N] natural logs, of ``ids[i]`` given ``ids[:i]`` for each i of ``at``.
"""

import json
import sys
from typing import Any

import torch
from transformers import AutoModelForCausalLM


def log_probs(model: Any, ids: list[int], at: list[int]) -> list[float]:
    """One pass in float32. Only the asked positions meet the vocabulary: 10,000 of them all would be 6 GB."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0]
        logits = model.lm_head(hidden[[i - 1 for i in at]]).float()
    found = torch.log_softmax(logits, -1)
    return found[torch.arange(len(at)), torch.tensor([ids[i] for i in at])].tolist()


if __name__ == "__main__":
    loaded = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
    json.dump([log_probs(loaded, row["ids"], row["at"]) for row in json.load(sys.stdin)], sys.stdout)
