"""FLOPs, bytes and seconds of compiled programs and of jaxprs.

XLA's own `cost_analysis` counts a loop's body once whatever its trip count, gives
nothing for GPU programs compiled without the device, and adds -1 s for each operation
it does not know on TPU; so the counting is done here, trip counts included.
"""

from remat._cost._figures import Cost as Cost
from remat._cost._jaxpr import jaxpr_cost as jaxpr_cost
from remat._cost._module import module_cost as module_cost
