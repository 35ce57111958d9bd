"""The probe: what each layer would have answered, and which experts it took. It observes and changes nothing.

Source: the record and its file are documented in docs/probe.md.
"""

from bmoe.probe.file import ProbeFile
from bmoe.probe.observer import Probe
from bmoe.probe.reader import read
from bmoe.probe.record import Record

__all__ = ["Probe", "ProbeFile", "Record", "read"]
