"""Reference models in Flax: what the policies are shown and tested on."""

from remat.models._errors import CheckpointError as CheckpointError
from remat.models._errors import PresetError as PresetError
from remat.models._errors import TrainError as TrainError
from remat.models._hf import Pretrained as Pretrained
from remat.models._hf import load_hf as load_hf
from remat.models._presets import Built as Built
from remat.models._presets import build as build
from remat.models._presets import n_params as n_params
from remat.models._presets import presets as presets
from remat.models._progress import progress_bar as progress_bar
from remat.models._train import Trained as Trained
from remat.models._train import train as train
from remat.models._train_loop import StepMetrics as StepMetrics
from remat.models._training_step import make_optimizer as make_optimizer
from remat.models._training_step import train_step as train_step
