"""A worker process of Beam's local runner that ends with its build, also after SIGKILL.

python -m data_pipeline.local_worker PID, started by the process PID (`workers.make_runner`)

A killed build can end nothing, and Beam's own worker would wait for work for ever.
"""

from __future__ import annotations

import os
import sys
import threading
import time

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h, as after SIGTERM
# Between two looks at the parent process.
_PAUSE_S = 0.5


def end_with(parent: int) -> None:
    """Start a thread that ends this process once `parent` is no longer its parent."""

    def wait() -> None:
        # An orphan gets another parent. Unlike a pipe or a signal, this needs nothing from a killed
        # parent.
        while os.getppid() == parent:
            time.sleep(_PAUSE_S)
        # sys.exit would end this thread only.
        os._exit(EXIT_CODE)

    threading.Thread(target=wait, name="end of the build", daemon=True).start()


if __name__ == "__main__":
    end_with(int(sys.argv[1]))  # before the import, which takes seconds
    from apache_beam.runners.worker import sdk_worker_main

    sdk_worker_main.main(sys.argv)
