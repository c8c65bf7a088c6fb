"""The failure simulator: goodput and uptime of training runs on up to millions of chips. Pure: numpy, no clock, no I/O.

`constants` has every assumption; `strikes` draws interruptions, `job` turns them into one job's timeline, `fleet`
makes a run of jobs, and `windows` drives the syncer's own window, grace and membership code over their timelines.
`renewal` has the formulas that the simulation meets where they hold; `figures` the paper's, `calibrate` fits the free
constants. `bandwidth` and `plan` answer what a run needs of its network and machines.
docs/explanation/simulator.md says the rest.
"""
