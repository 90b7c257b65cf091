"""Read compiled programs: XLA's `HloProto`, its module and its buffer assignment."""

from remat._hlo._errors import HloError as HloError
from remat._hlo._module import Module as Module
from remat._hlo._parse import parse as parse
