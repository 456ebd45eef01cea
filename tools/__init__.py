"""Programs for developers of distsim, which the wheel does not have, started as `python -m tools.FOLDER.NAME`.

`benchmarks` measures distsim beside its peers; `fitting` fits the shipped constants to published measurements.
"""
