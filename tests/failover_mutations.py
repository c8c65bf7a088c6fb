"""Deliberate defects that show where another server takes over, or where the one before lives on for some."""

from diloco.pipeline.bus.tape_reading import TapeReader
from diloco.pipeline.view import ledger
from tests.mutations import Mutation

FAILOVER_MUTATIONS = [
    Mutation(
        "who follows a tape goes on where it was, whichever server it is on",
        TapeReader,
        "read",
        (("gone = await lost(", "gone = set[int]() and await lost("),),
    ),
    Mutation(
        "of two histories the later records count",
        ledger,
        "surviving",
        (("if leads := _merges_to(made, (fragment, version, digest)):", "if leads := {}:"),),
    ),
]
