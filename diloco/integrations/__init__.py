"""Learners inside other libraries' trainers, added in two lines. Each file needs its own extra:

| trainer | file | extra |
|---|---|---|
| transformers' `Trainer`, TRL's trainers | `transformers.py` | `transformers`, `trl` |
| Lightning's `Trainer` | `lightning.py` | `lightning` |
| torchtitan's `Trainer` | `torchtitan.py` | `torchtitan` |
| your own loop, with Accelerate, Fabric or neither | `loops.py` | `accelerate`, `lightning`, `learner` |
"""
