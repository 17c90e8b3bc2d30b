"""What a step tells, for loggers, progress bars and eyes.

Everything here runs on the host, on what a step has returned; nothing is added to the step. No
logger is imported: they are known by their methods.
"""

from jaxaccum.reporting.records import CsvWriter as CsvWriter
from jaxaccum.reporting.records import log as log
from jaxaccum.reporting.records import scalars as scalars
from jaxaccum.reporting.records import summary as summary
from jaxaccum.reporting.windows import WindowReport as WindowReport
from jaxaccum.reporting.windows import plot as plot
from jaxaccum.reporting.windows import window_report as window_report
