"""A process that records calls and tells on stdout what is durable; the test kills it at any moment.

usage: python capture_writer.py DIRECTORY TURNS
"""

import asyncio
import sys
from pathlib import Path

from polar_env.capture import Ledger, SegmentLog
from trajectory_helpers import SESSION, long_session


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def main(directory: Path, turns: int) -> None:
    records = long_session(turns, 60 * turns)
    say("ready")
    async with SegmentLog(directory) as log:
        ledger = Ledger(SESSION, log)
        for record in records:
            await ledger.append(record)
            say(record.call_id)
            ledger.mark_delivered(record.call_id)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
