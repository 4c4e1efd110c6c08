"""`chameleon-mm run`: a training script as it is, swapped from its first step.

program = Program("train.py", arguments)     # what `python train.py arguments` would run, as `__main__`
watch = TrainingWatch(make_session)          # finds the first forward that trains, and the steps from there on
ending = program.run()                       # exit code, traceback and output as Python's own
report = watch.finish(ending.error)
"""

from __future__ import annotations
