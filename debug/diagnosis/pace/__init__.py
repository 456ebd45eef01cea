"""Whether ranks keep pace, by a matrix of own work by rank and step.

`turns.py` finds each member's own work before the calls in which all wait; `steps.py` cuts turns into steps;
`statistic.py` decides who is chronically slow, and says what could be seen; `changes.py` finds pauses and
steps that became longer; `job.py` does all that for the groups of a job; `durations.py` makes turns of durations on the
device.
"""

__all__ = ["changes", "durations", "job", "statistic", "steps", "turns"]
