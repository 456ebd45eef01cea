"""What the shipped constants, and the intervals of the times that come of them, are fitted by.

`fit.py` fits the model of NCCL to measured tables (`least_squares.py`) and writes how far predictions of unknown
machines lie off (`coverage.py`). `training_steps.py` is `distsim validate --training`; `step_errors.py` writes the
intervals of steps.
"""
