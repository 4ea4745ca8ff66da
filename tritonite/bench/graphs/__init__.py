"""Whole graphs: cold start, steady state, new shapes and start from a file, for each model and way to run it.

- `subjects.py`: the models, their inputs and calls.
- `ways.py`: the ways to run a model, such as "inductor" and "tritonite-graph".
- `measure.py`: the process that measures one model in one way.
- `run.py`: starts these processes, each with caches of its own and a time limit.
- `results.py`: results, their JSON file and their table.
"""
