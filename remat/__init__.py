"""Named activation-rematerialization policies for JAX and Flax."""

import importlib
from typing import Any

from remat import _first_import as _first_import

# isort: split

from remat import policies as policies
from remat._analyze import analyze as analyze
from remat._buffer import Buffer as Buffer
from remat._compare import compare as compare
from remat._comparison import Comparison as Comparison
from remat._comparison import Row as Row
from remat._diff import Change as Change
from remat._diff import ReportDiff as ReportDiff
from remat._explain_step import Explanation as Explanation
from remat._explain_step import explain as explain
from remat._fit import Fit as Fit
from remat._fit import fit as fit
from remat._hlo import HloError as HloError
from remat._lint import Finding as Finding
from remat._lint import lint as lint
from remat._plan._check import PlanCheck as PlanCheck
from remat._plan._check import check_plan as check_plan
from remat._plan._curve import Curve as Curve
from remat._plan._curve import frontier as frontier
from remat._plan._errors import PlanError as PlanError
from remat._plan._plan import plan as plan
from remat._plan._plan_file import Plan as Plan
from remat._read_dump import report_from_dump as report_from_dump
from remat._regions import CapturedModuleError as CapturedModuleError
from remat._regions import MissingNamesWarning as MissingNamesWarning
from remat._regions import NoNamesFound as NoNamesFound
from remat._regions import Region as Region
from remat._regions import RegionError as RegionError
from remat._regions import find_regions as find_regions
from remat._regions import with_policy as with_policy
from remat._report import MemoryReport as MemoryReport
from remat._residuals import Residual as Residual
from remat._residuals import residuals as residuals
from remat._roles import Roles as Roles
from remat._scan import scan as scan
from remat._segment_scans import segment_scans as segment_scans
from remat._segments import SegmentsError as SegmentsError
from remat._sequential import sequential as sequential
from remat._targets import Target as Target
from remat._targets import TargetError as TargetError
from remat._targets import target as target
from remat._targets import targets as targets
from remat._wrap import remat as remat


def __getattr__(name: str) -> Any:
    """Imports `remat.models` and `remat.testing` when first used: they need Flax."""
    if name in ("models", "testing"):
        return importlib.import_module(f"remat.{name}")
    raise AttributeError(f"module 'remat' has no attribute {name!r}")
