"""vLLM's server with a fault of its CPU builds mended. The processes that it starts on a CPU import this file anew, and
are mended too.

On machines with Triton nothing is changed, and this is `vllm serve`.
"""

import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # for the file beside this one
from vllm_temperatures import write_temperatures  # noqa: E402  # pyright: ignore[reportMissingImports]


def end_with(parent: int) -> None:
    """End the group of this process when the one that started it is gone, even where that was killed."""
    while os.getppid() == parent:
        time.sleep(1)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":  # before vLLM is imported, which takes long enough for a parent to be killed meanwhile
    threading.Thread(target=end_with, args=[os.getppid()], daemon=True).start()
write_temperatures()
if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
