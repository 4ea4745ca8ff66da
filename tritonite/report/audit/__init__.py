"""`audit`: check samples of a program's own calls while it runs.

- audit: the audit of a process or a with block
- call: a sampled call: its copies, and its results by the kernel, by ATen and in float64
- checks: what is found in a sampled call
- finding: a finding
"""

from tritonite.report.audit.audit import audit, running
from tritonite.report.audit.finding import Finding

__all__ = ["Finding", "audit", "running"]
