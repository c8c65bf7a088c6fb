"""Drivers of other programs for `bench compare`: each is run by the Python of that program's own environment.

None imports anything of ours, nor another driver. A driver is started as `python -P FILE '{"number": 0, ...}'` (see
`crew.py` beside this folder), says hello in one JSON line on stdout, then answers each line on stdin by one of its own:

- hello: `versions` and `settings`, as they stand beside the figures; `address`, if the others need one to join.
- `prepare`: move the weights, as training would, and be ready. The answer may be empty.
- `round`: synchronise once. `began` and `adopted` (monotonic clock, seconds), `blocked_s` where the trainer stands
  still, `server_cpu_s` where there is something like a server within the process.
- `check`: `lengths` of the fragment that each learner has adopted last. All learners of a run must have the same.

What a program writes to stdout otherwise goes to stderr. It ends when stdin does.
"""
