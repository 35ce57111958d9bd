"""What decisions cost on this machine, beside what they cannot do without, and beside the stock way."""

from bmoe.bench.bandwidth import Probe
from bmoe.bench.measurement import measure
from bmoe.bench.memory import Bound
from bmoe.bench.plan import Plan
from bmoe.bench.repetition import Repetition
from bmoe.bench.report import Cached, Decision, Floor, Memory, Report
from bmoe.bench.stock import TIMES, Comparison, Stock, Way

__all__ = [
    "TIMES",
    "Bound",
    "Cached",
    "Comparison",
    "Decision",
    "Floor",
    "Memory",
    "Plan",
    "Probe",
    "Repetition",
    "Report",
    "Stock",
    "Way",
    "measure",
]
