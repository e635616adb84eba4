"""NeMo Gym's ``prefix_merging`` through its public call, on the calls of ``bench/trajectory.py``: a process of its own.

usage: python bench/trajectory_peer.py TURNS TOKENS

Says ``ready`` when its entries are made, then one line of JSON: processor time of the builder in ms, tokens it
delivers, and the most memory the process ever held in MiB. It is given each call's parent (its servers resolve them
while serving); ours finds the parents itself.
"""

import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from nemo_gym.token_id_capture.builder import run_builder
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from trajectory_helpers import SESSION, long_session


def entries(turns: int, tokens: int) -> Iterator[TokenEntry]:
    """The session's calls as its token-id capture keeps them, but for the integers, which they share: read from JSON,
    each prompt has its own, 36 bytes a token (the builder takes as long)."""
    records = long_session(turns, tokens)
    whole, parent = [*records[-1].prompt_ids, *records[-1].sampled_ids], None
    for record in records:
        prompt = len(record.prompt_ids)
        entry = TokenEntry(
            rollout_id=SESSION,
            model_call_id=record.call_id,
            prompt_token_ids=whole[:prompt],
            generation_token_ids=whole[prompt : prompt + len(record.sampled_ids)],
            generation_log_probs=record.log_probs.tolist(),
        )
        status = ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT
        yield stamp_lineage(entry, parent, parent_resolution=status)
        parent = record.call_id


def main() -> None:
    captured = list(entries(int(sys.argv[1]), int(sys.argv[2])))
    print("ready", flush=True)
    start = time.process_time()
    delivered = run_builder(captured).notes.generated_tokens_delivered
    spent = 1e3 * (time.process_time() - start)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"ms": spent, "tokens": delivered, "mib": most}))


if __name__ == "__main__":
    main()
