"""The input of a plan: a model, and the machines and links that train it. Pure."""

import math
from itertools import pairwise

from pydantic import Field

from diloco.pipeline.errors import UsageError
from diloco.pipeline.messages.wire import OuterName
from diloco.pipeline.outer_cost import transformer_operations
from diloco.pipeline.settings import Settings
from diloco.pipeline.units import Amount, BitRate, Span, written

# The smallest and largest model that is planned for.
MIN_PARAMS, MAX_PARAMS = 1e4, 1e13
# In bit/s. A smaller number is one whose unit was left out.
MIN_LINK = 1e3
# How much larger than the model its layers may be: people round the number of parameters.
MAX_IN_LAYERS = 1.1
# Pairs (parameters, layers): the smallest as in arXiv:2005.14165, Table 2.1; the others as in arXiv:2501.18512. 10B and
# 100B are assumed.
_LAYERS = ((125e6, 12), (1e9, 24), (10e9, 48), (100e9, 108))


class Site(Settings):
    """A model, and the machines and links that train it. Durations are in seconds."""

    section = "Model and link"

    from_environment = False
    """A plan is not a run: `DILOCO_*` variables of a real run do not apply."""

    params: Amount = Field(70e9, ge=MIN_PARAMS, le=MAX_PARAMS, description="Parameters of the model. Assumed")
    layers: int = Field(0, ge=0, le=10_000, description="Its layers; 0: derived from its width, or as usual. Assumed")
    width: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Its width n, with n x n and n x 4n matrices; 0: derived from its layers. Assumed",
    )
    step_time: Span = Field(5.0, gt=0, description="Compute time of an inner step. Assumed")
    link: BitRate = Field(
        100e9,
        ge=MIN_LINK,
        description="Bandwidth of a learner's link to the syncers, each way, in bits: 5Gbps, 800Mbit/s. Assumed; the "
        "paper also uses 2-5 Gbit/s",
    )
    latency: Span = Field(0.05, description="One-way latency of a control message. Assumed")
    merge_rate: Amount = Field(
        3.3e9, description="Bytes of deltas that one syncer core merges per second. Measured with M=8, bf16, numpy"
    )
    sync_time: Span = Field(
        0.0,
        description="Fixed cost per sync: staging and commit. Transfer and merging are computed from link, params and "
        "merge_rate. Assumed",
    )
    syncer_cores: int = Field(32, ge=1, le=1024, description="Cores a syncer merges with. Assumed")


def layers_of(params: float) -> int:
    """Return the number of layers of a model with this many parameters, interpolating known sizes logarithmically."""
    x = min(max(params, _LAYERS[0][0]), _LAYERS[-1][0])
    (low, few), (high, many) = next(pair for pair in pairwise(_LAYERS) if x <= pair[1][0])
    share = math.log(x / low) / math.log(high / low)
    return round(few * math.pow(many / few, share))


def shape_of(site: Site) -> tuple[float, float]:
    """Return width and layers of a site's model. What is not given follows from 12 n^2 parameters per layer.

    Raises:
        UsageError: the given layers and width make more parameters than the model has.
    """
    layers = site.layers or (site.params / 12 / site.width**2 if site.width else layers_of(site.params))
    width = site.width or math.sqrt(site.params / 12 / layers)
    if layers < 1 or 12 * width**2 * layers > MAX_IN_LAYERS * site.params:
        raise UsageError(
            f"{max(1, layers):g} layers of width {width:g} have {written(12 * width**2 * max(1, layers))} parameters "
            f"(12 n^2 per layer), but the model has {written(site.params)}: change --params, or leave out --layers or "
            "--width"
        )
    return width, layers


def params_of(site: Site) -> float:
    """Return the parameters of a site's model: as given, or else computed from layers and width if both are given.

    Raises:
        UsageError: the computed number is outside the range that is planned for.
    """
    if "params" in site.model_fields_set or not (site.layers and site.width):
        return site.params
    params = 12.0 * site.width**2 * site.layers
    if not MIN_PARAMS <= params <= MAX_PARAMS:
        raise UsageError(
            f"{site.layers} layers of width {site.width} have {written(params)} parameters (12 n^2 per layer), but a "
            f"plan covers {written(MIN_PARAMS)} to {written(MAX_PARAMS)}: change --layers or --width"
        )
    return params


def outer_operations(site: Site, outer: OuterName) -> float:
    """Return the operations of one outer step of all fragments, without elementwise work."""
    return transformer_operations(*shape_of(site), outer)
