"""Benchmarks of Tritonite against ATen, torch.compile and others.

- `cases.py`: the fixed cases of every operator, with shapes of models; `attention.py`, `fused.py`, `indexing.py`,
  `random.py`, `sampling.py` and `sorting.py` have the cases of their families.
- `drawn.py`, `drawing.py`, `families.py`: cases drawn at random from a seed.
- `models/`: passes of whole models, forward and of training.
- `regressions/`: choices that a timing decided, each against its alternative.
- `workers.py`, `run.py`, `timing.py`: check every case against ATen in several processes, then time it.
- `results.py`, `percentiles.py`: results, their JSON form, comparison of runs, statistics of drawn cases.
- `console.py`, `charts.py`, `page.py`: output on a terminal, as PNG charts, and as an HTML page.
"""
