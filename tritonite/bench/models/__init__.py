"""Whole models: passes checked against ATen's, timed for every provider, and profiled by operator.

- `workload.py`: what models run on, and their passes.
- `language.py`, `vision.py`: models of text and speech, and of images.
- `zoo.py`: further models, by their configurations.
- `catalog.py`: the models by name.
- `passes.py`: checks, times and profiles.
- `apart.py`: the same of several models at a time, each in a process of its own.
"""

from tritonite.bench.models.catalog import MODELS as MODELS
from tritonite.bench.models.catalog import OF_IMAGES as OF_IMAGES
from tritonite.bench.models.catalog import STEPS as STEPS
from tritonite.bench.models.catalog import ZOOS as ZOOS
from tritonite.bench.models.catalog import ModelCase as ModelCase
from tritonite.bench.models.catalog import phases as phases
from tritonite.bench.models.catalog import zoo as zoo
from tritonite.bench.models.passes import MINIMUM_SIMILARITY as MINIMUM_SIMILARITY
from tritonite.bench.models.passes import agreements as agreements
from tritonite.bench.models.passes import measure as measure
from tritonite.bench.models.workload import Phase as Phase
from tritonite.bench.models.workload import Workload as Workload
