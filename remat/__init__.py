"""Named activation-rematerialization policies for JAX and Flax."""

import importlib
from typing import Any

from remat._targets import _first_import as _first_import

# isort: split

from remat import policies as policies
from remat._compare._compare import compare as compare
from remat._compare._comparison import Comparison as Comparison
from remat._compare._comparison import Row as Row
from remat._compare._fit import Fit as Fit
from remat._compare._fit import fit as fit
from remat._explain._step import Explanation as Explanation
from remat._explain._step import explain as explain
from remat._hlo import HloError as HloError
from remat._lint._lint import Finding as Finding
from remat._lint._lint import lint as lint
from remat._naming._residuals import Residual as Residual
from remat._naming._residuals import residuals as residuals
from remat._plan._check import PlanCheck as PlanCheck
from remat._plan._check import check_plan as check_plan
from remat._plan._curve import Curve as Curve
from remat._plan._curve import frontier as frontier
from remat._plan._errors import PlanError as PlanError
from remat._plan._plan import plan as plan
from remat._plan._plan_file import Plan as Plan
from remat._regions._with_policy import CapturedModuleError as CapturedModuleError
from remat._regions._with_policy import MissingNamesWarning as MissingNamesWarning
from remat._regions._with_policy import NoNamesFound as NoNamesFound
from remat._regions._with_policy import Region as Region
from remat._regions._with_policy import RegionError as RegionError
from remat._regions._with_policy import UnmatchedRuleWarning as UnmatchedRuleWarning
from remat._regions._with_policy import find_regions as find_regions
from remat._regions._with_policy import with_policy as with_policy
from remat._regions._with_policy import with_regions as with_regions
from remat._report._analyze import analyze as analyze
from remat._report._buffer import Buffer as Buffer
from remat._report._diff import Change as Change
from remat._report._diff import ReportDiff as ReportDiff
from remat._report._on_device import Measured as Measured
from remat._report._on_device import measure as measure
from remat._report._read_dump import report_from_dump as report_from_dump
from remat._report._report import MemoryReport as MemoryReport
from remat._report._roles import Roles as Roles
from remat._scan._scan import scan as scan
from remat._scan._segment_scans import segment_scans as segment_scans
from remat._scan._segmented import SegmentedScan as SegmentedScan
from remat._scan._segmented import find_segments as find_segments
from remat._scan._segments import SegmentsError as SegmentsError
from remat._scan._segments import SegmentsWarning as SegmentsWarning
from remat._scan._sequential import sequential as sequential
from remat._targets._target import Target as Target
from remat._targets._target import TargetError as TargetError
from remat._targets._target import target as target
from remat._targets._target import targets as targets
from remat._wrap._wrap import remat as remat


def __getattr__(name: str) -> Any:
    """Imports `remat.models` and `remat.testing` when first used: they need Flax."""
    if name in ("models", "testing"):
        return importlib.import_module(f"remat.{name}")
    raise AttributeError(f"module 'remat' has no attribute {name!r}")
