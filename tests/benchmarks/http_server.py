"""A server for the tests of `benchmarks.http_peers`: PORT [dies]. It streams "a b", and has a child."""

import asyncio
import subprocess
import sys
import time
from typing import Any

from tests.tokenmill.bench.scripted_server import Scripted, ScriptedServer, completion

USAGE = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
CPU_SECONDS = 0.02


def answer(_method: str, path: str, _headers: Any, _body: Any) -> Scripted:
    if path == "/ready":
        return Scripted()
    end = time.process_time() + CPU_SECONDS
    while time.process_time() < end:
        pass
    return Scripted(completion(["a", " b"], USAGE))


async def main(port: int) -> None:
    listening = await asyncio.start_server(ScriptedServer(answer).handle, "127.0.0.1", port)
    async with listening:
        await listening.serve_forever()


if __name__ == "__main__":
    if sys.argv[2:] == ["dies"]:
        sys.exit("no memory left")
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    sys.stdout.write(f"{child.pid}\n")
    sys.stdout.flush()
    asyncio.run(main(int(sys.argv[1])))
