"""One rollout from Python, without NeMo Gym: an unmodified CLI on one task, and the row a trainer would get.

.venv/bin/python examples/one_rollout.py                        # scripted engine, embedded task, Pi
.venv/bin/python examples/one_rollout.py engine=vllm 'engine.base_urls=[http://127.0.0.1:8000/v1]'
"""

import asyncio
import sys

from polar_env.config import compose
from polar_env.gym import rows
from polar_env.rollout import RolloutJob, open_proxy, rollout
from polar_env.tasks import rows as tasks
from polar_env.types import Sampling


async def main(overrides: list[str]) -> None:
    config = compose(["engine=scripted", "harness=pi", "data=embedded", *overrides])
    task = tasks.load(config.data)[0]
    async with open_proxy(config) as proxy:
        result = await rollout(RolloutJob(task, config.harness, Sampling(temperature=1.0)), proxy, config)
    row = rows.row(result, {"input": task.instruction}, model="policy", max_tokens=None)
    print(f"{result.harness} on {result.task_id}: {result.outcome}, reward {row['reward']}")
    for chain in result.trajectory.chains:
        for turn in chain.turns:
            shown = f"{len(turn.prompt_ids)} prompt ids, {len(turn.sampled_ids)} sampled"
            print(f"  {turn.call_id}: {shown}, trained: {turn.trained}")


asyncio.run(main(sys.argv[1:]))
