"""Several processes that reduce together: one that is lost ends the others, each with one line."""

import os
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

import jax

__all__ = ["Watchdog"]

FAILED = 1  # exit code


class Watchdog:
    """Ends this process when it says nothing for `limit` seconds, in whatever call it hangs.

    A process waits in its next reduction for one that is gone or hangs, and JAX's own answer comes
    after minutes, as an abort. A normal exit, too, would wait for the lost one; a watchdog leaves
    through `os._exit`, past all exit handlers, so nothing may be left to write by then.

    As a context manager it ends the process on any error, with one line where the runtime reports
    that another process is lost, and with the traceback of others; without an error it stops.

    Attributes:
      name: how this process is called in its line.
      limit: seconds without a word after which it ends. The first step also reads, connects and
        compiles: begin with minutes, and set this lower after it.
      doing: what it is at.

    Example:
      >>> from jaxaccum.multihost import Watchdog
      >>> with Watchdog("process 0", limit=300.0) as watchdog:
      ...     for step in range(3):
      ...         watchdog.beat(f"in step {step}")
      ...         watchdog.limit = 20.0
    """

    def __init__(self, name: str, limit: float):
        self.name, self.limit, self.doing = name, limit, "starting"
        self._once, self._stopped = threading.Lock(), threading.Event()
        self._last = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def beat(self, doing: str) -> None:
        """Says that what came before is complete.

        Args:
          doing: what comes next, for the line.

        Returns:
          Nothing.
        """
        self.doing, self._last = doing, time.monotonic()

    def end(self, reason: str) -> NoReturn:
        """Ends the process with exit code 1 and the line `name: reason, while doing`.

        Args:
          reason: why; only the first one counts.

        Returns:
          Never.
        """
        self._once.acquire()  # never released
        os.write(2, f"\n{self.name}: {reason}, while {self.doing}\n".encode())
        os._exit(FAILED)

    def stop(self) -> None:
        """Watches no longer.

        Returns:
          Nothing.
        """
        self._stopped.set()

    def __enter__(self) -> "Watchdog":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            self.end(f"lost another process ({' '.join(f'{error}'.split())[:200]})")
        if error is not None:
            traceback.print_exception(kind, error, trace)
            self.end("failed")
        self.stop()

    def _watch(self) -> None:
        while (silent := time.monotonic() - self._last) < self.limit:
            if self._stopped.wait(max(0.01, min(0.5, self.limit - silent))):
                return
        self.end(f"nothing was completed for {self.limit:.0f} s; another process hangs or is gone")
