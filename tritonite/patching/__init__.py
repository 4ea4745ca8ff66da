"""Models whose modules get fused operators in place: `tritonite.patch(model)` and `tritonite.unpatch(model)`.

A module is recognised by its parameters, its attributes and what it computes on random inputs, never by its class.

- apply.py: `patch` walks over a model and asks every kind; `unpatch`
- norms.py, mlps.py, experts.py: kinds that look at one module alone
- rotary.py, losses.py: kinds that look at a run of the whole model on sample inputs
- deferred.py: logits that are not computed unless something but a loss needs them
- rebind.py: gives one module a forward of its own, and takes it away
- samples.py: random inputs, and the comparison of results and gradients
- report.py: what was replaced, what was not, and why

A call of a patched norm: torch.nn.Module's `__call__` runs the hooks and `self.forward`, which `rebind.py` has set on
the instance. That function calls the operator, or for arguments that the operator does not serve, the class's forward.
"""

from tritonite.patching.apply import patch, unpatch
from tritonite.patching.report import Kept, PatchReport, Replaced

__all__ = ["Kept", "PatchReport", "Replaced", "patch", "unpatch"]
