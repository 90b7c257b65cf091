"""Named activation-rematerialization policies for JAX and Flax."""

from remat import policies as policies
from remat._regions import MissingNamesWarning as MissingNamesWarning
from remat._regions import NoNamesFound as NoNamesFound
from remat._regions import Region as Region
from remat._regions import RegionError as RegionError
from remat._regions import find_regions as find_regions
from remat._regions import with_policy as with_policy
