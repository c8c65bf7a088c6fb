"""A learner in somebody else's trainer, in two lines; each file needs an extra of its own, and says which.

| trainer | file | extra |
|---|---|---|
| transformers' `Trainer`, TRL's trainers | `transformers.py` | `transformers`, `trl` |
| Lightning's `Trainer` | `lightning.py` | `lightning` |
| loops of one's own, with Accelerate, Fabric or neither | `loops.py` | `accelerate`, `lightning`, `learner` |
"""
