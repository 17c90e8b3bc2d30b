"""What a compiled step really does: collectives, memory, donation, precision of its sums."""

from jaxaccum.auditing.findings import Collective as Collective
from jaxaccum.auditing.findings import DonatedBuffer as DonatedBuffer
from jaxaccum.auditing.findings import LoopSum as LoopSum
from jaxaccum.auditing.findings import Memory as Memory
from jaxaccum.auditing.report import Audit as Audit
from jaxaccum.auditing.step import audit as audit
