"""The simulated world: learners, syncers and a bus with faults, and an oracle that judges every call."""
