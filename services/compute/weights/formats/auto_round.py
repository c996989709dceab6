"""AutoRound (Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent", 2023): another
way to find codes, in the layouts of GPTQ and AWQ.

`packing_format` says in which; its own, `auto_round`, is GPTQ's second version. extra_config has
settings of single layers, by name or pattern; those of 16 bits are dense.
"""

from services.compute.weights.formats.awq import read_awq
from services.compute.weights.formats.gptq import read_gptq
from services.compute.weights.formats.options import Options
from services.compute.weights.formats.stored import WeightFormat

VERSIONS = {"auto_round:auto_gptq": "gptq", "auto_round:gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}
AWQ = "auto_round:auto_awq"
FIELDS = ("bits", "group_size", "sym")


def read_auto_round(options: Options) -> WeightFormat:
    packing = options.choice(("packing_format",), (*VERSIONS, AWQ))
    options.choice(("data_type",), ("int",), "int")
    settings = {name: options.values[name] for name in FIELDS if name in options.values}
    if packing == AWQ:
        return read_awq(Options(settings))
    extra = options.section("extra_config") or Options({})
    dynamic = {name: layer.values for name, layer in extra.sections() if layer.integer("bits", default=16) < 16}
    return read_gptq(Options(settings | {"checkpoint_format": VERSIONS[packing], "dynamic": dynamic}))
