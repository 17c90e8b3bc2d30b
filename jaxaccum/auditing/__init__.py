"""What a compiled step really does: collectives, memory, donation, precision of its sums."""

from jaxaccum.auditing.findings import Collective, DonatedBuffer, LoopSum, Memory
from jaxaccum.auditing.report import Audit
from jaxaccum.auditing.step import audit

__all__ = ["Audit", "Collective", "DonatedBuffer", "LoopSum", "Memory", "audit"]
