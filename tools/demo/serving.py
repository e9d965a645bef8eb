"""``tokenplane serve`` for one demo: it ends when the demo does, however that comes about.

Run as ``python -m tokenplane.tools.demo.serving ARGUMENTS`` with a pipe as standard input. The
kernel closes the pipe even where the demo is killed; its end is taken for a SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from tokenplane.tools.serve import main


def _end_with_demo() -> None:
    while os.read(0, 4096):  # unbuffered: a buffered read would hold a lock that exit needs
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_demo, name="demo-watch", daemon=True).start()
    sys.exit(main(sys.argv[1:]))
