"""Every assumption of the simulator in one class, each with its source or the word 'calibrated'. Pure.

'Paper' is arXiv:2604.21428. 'Calibrated': found by `diloco simulate calibrate` from the 150k and 1.2M columns of the
paper's table. 'Assumed': neither published nor fitted; the default leaves the paper's table as it is. What a real run
has a default for that the paper does not give is that default.
"""

from pathlib import Path
from typing import Literal

from pydantic import Field

from diloco.pipeline.messages.wire import MAX_MEMBERS, OuterName
from diloco.pipeline.methods import METHODS
from diloco.pipeline.needs import GLOBALS
from diloco.pipeline.settings import SyncerSettings, SyncSettings, defaults
from diloco.pipeline.site import Site
from diloco.pipeline.units import YEAR_S, Span

USUAL = defaults(SyncSettings) | defaults(SyncerSettings)
"""A real run's defaults."""
PAPER = METHODS["paper"].settings
DAY_S = 86_400.0


class Constants(Site):
    """What the simulated world is like. Durations are seconds of wall time."""

    section = "The simulated world"

    # --- interruptions
    mtbi: Span = Field(YEAR_S, gt=0, description="Mean time between interruptions of a chip. Paper: 1 year")
    slice_chips: int = Field(
        64, ge=1, description="Chips that leave and return together: the unit of resizing. Assumed"
    )
    repair: Literal["weibull", "constant", "trace"] = Field(
        "weibull",
        description="Distribution of the time until an interrupted slice is back. Paper: exponentiated Weibull",
    )
    repair_mean: Span = Field(
        30.0,
        gt=0,
        description="Mean of that time. Assumed: in the paper's table, 20 s and 60 s differ by no more than rounding",
    )
    repair_shape: float = Field(0.8, ge=0.1, description="Weibull shape; below 1 the tail is heavy. Assumed")
    repair_power: float = Field(
        2.0,
        gt=0,
        le=1000,
        description="Exponent of the Weibull's distribution function; above 1, very short times are rare. Assumed",
    )
    repair_trace: Path | None = Field(None, description="File of repair times, in seconds, in lines to sample from")
    rack_mtbi: Span = Field(0.0, description="Mean time between failures of a whole rack; 0: none. Assumed")
    rack_chips: int = Field(256, ge=1, description="Chips per rack. Assumed")
    region_mtbi: Span = Field(0.0, description="Mean time between outages of a whole region; 0: none. Assumed")
    region_repair: Span = Field(3600.0, gt=0, description="Length of a region's outage. Assumed")
    regions: int = Field(4, ge=1, description="Regions over which chips, or whole learners, are spread. Assumed")

    # --- what a job does about them
    gather: Span = Field(
        9.6,
        description="Time from the first interruption or return until the pause that handles it: the other slices "
        "continue to train, and further events join the same pause. Calibrated",
    )
    detect: Span = Field(
        0.0, description="Time lost before each pause after an interruption, in which all slices hang. Assumed"
    )
    down: Span = Field(18.0, description="Pause of an elastic job before it continues with fewer slices. Calibrated")
    up: Span = Field(18.0, description="Pause of an elastic job before slices return. Calibrated, as long as `down`")
    restart: Span = Field(
        70.0, description="Inelastic job: time from the last slice's return until it trains again. Calibrated"
    )
    checkpoint_every: Span = Field(
        0.0,
        description="Inelastic job: training time between checkpoints; training after the last one is repeated. 0: "
        "every step, to host memory. Paper: learners copy the model to host RAM after each step",
    )
    checkpoint_write: Span = Field(0.0, description="Time that each checkpoint stops the training. Assumed")

    # --- chips and steps
    step_jitter: float = Field(
        0.0, ge=0, le=10, description="Maximum random lengthening of a learner's inner steps, as share. Assumed"
    )
    older_learners: float = Field(0.0, ge=0, le=1, description="Share of the learners on older hardware. Assumed")
    older_slowdown: float = Field(0.0, ge=0, le=10, description="How much longer their steps are, as share. Assumed")

    # --- the protocol
    sync_interval: int = Field(PAPER["sync_interval"], ge=1, description="H of decoupled learners. Paper: 24")
    fragments: int = Field(PAPER["fragments"], ge=1, le=1024, description="P. Paper: 24")
    quorum: int = Field(
        PAPER["quorum"], ge=1, le=MAX_MEMBERS, description="K of decoupled learners. Paper: 1, with grace"
    )
    overlap_steps: int = Field(PAPER["overlap_steps"], ge=0, description="tau. Paper: 2")
    grace_gamma: float = Field(
        USUAL["grace_gamma"],
        ge=0,
        lt=1,
        description="Share of the slack spent on the grace; 0: none. The syncer's own default",
    )
    outer: OuterName = Field(
        PAPER["outer"],
        description="Outer optimizer; all except nesterov multiply matrices on the syncers. Paper: nesterov",
    )
    diloco_interval: int = Field(500, ge=1, description="H of synchronous DiLoCo. arXiv:2311.08105: 500")
    liveness: Span = Field(
        USUAL["liveness_s"],
        gt=0,
        description="Merges do not wait for a learner that is silent for this long. The syncer's own default",
    )

    # --- the network between learners and syncers
    wire_bits: float = Field(16, ge=1, le=32, description="Bits per element of a delta. Paper: bf16")
    global_bits: float = Field(
        8 * GLOBALS[USUAL["global_codec"]].pulled,
        ge=1,
        le=32,
        description="Bits per element of a global that learners pull. A run's own default",
    )
    link_trace: Path | None = Field(
        None, description="File of lines `second bits_per_second latency_s`, each valid until the next; 0 bit/s: outage"
    )


class Planned(Constants):
    """The world that a plan is made for: what the product does if nobody says otherwise, not what the paper does."""

    outer: OuterName = Field(
        USUAL["outer"], description="Outer optimizer; all except nesterov multiply matrices on the syncers"
    )
