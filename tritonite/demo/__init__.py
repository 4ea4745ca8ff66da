"""Demonstrations: pretrained models of PyPI's packages in ATen and in Tritonite, compared.

- `minilm.py`: MiniLM-L6-v2, embeddings of sentences.
- `smollm2.py`: SmolLM2-135M-Instruct, a Llama; answers to prompts.
"""

from __future__ import annotations

from rich.console import Console

from tritonite.demo import minilm, smollm2
from tritonite.demo.minilm import minilm_folder as minilm_folder

DEMOS = {"minilm": minilm.run, "llama": smollm2.run}


def run(console: Console, model: str = "minilm") -> bool:
    """Print the demo of a model in `DEMOS`.

    Returns whether Tritonite agrees with ATen; False if a package is missing.
    """
    return DEMOS[model](console)
