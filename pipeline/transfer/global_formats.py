"""The formats in which globals lie on the bus, by the run's `global_codec`. Pure.

global_codec   the global payload              in addition
fp32           the values                      nothing
bf16           the values, rounded             the rest: what rounding removed
int8           the values of a key frame       the last updates, some of which led to the key frame
"""

from collections.abc import Mapping
from typing import Final

from diloco.pipeline.messages.wire import GlobalCodec
from diloco.pipeline.transfer.global_bf16 import Bf16Globals
from diloco.pipeline.transfer.global_format import Fp32Globals, GlobalFormat
from diloco.pipeline.transfer.global_int8 import Int8Globals

FORMATS: Final[Mapping[GlobalCodec, GlobalFormat]] = {
    "fp32": Fp32Globals(),
    "bf16": Bf16Globals(),
    "int8": Int8Globals(),
}
