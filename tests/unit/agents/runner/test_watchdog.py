import asyncio
import sys

import pytest

SCRIPT = """
import asyncio, sys, time
from trinity_agents.runner import agent
agent.TICK = 0.05

async def main():
    watching = asyncio.ensure_future(agent.Watchdog(0.5).run())
    await asyncio.sleep(0.8)
    if sys.argv[1] == "blocks":
        def held_here():
            time.sleep(30)
        held_here()
    await asyncio.sleep(0.1)
    watching.cancel()
    await asyncio.wait([watching])
    time.sleep(0.8)  # nobody watches any more

asyncio.run(main())
"""


@pytest.mark.parametrize(("does", "code"), [("blocks", 75), ("ticks", 0)])
async def test_a_process_whose_loop_is_held_ends_and_says_where(does, code):
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", SCRIPT, does, stderr=asyncio.subprocess.PIPE)
    async with asyncio.timeout(45):  # the child imports what a runner imports
        _, said = await process.communicate()
    assert process.returncode == code
    assert (b"held_here" in said) == (does == "blocks")
