"""torch's dispatch mode, which sees every operator below autograd. This file is its only importer.

Torch documents the class but keeps it in a private module, so that a release may move it.
"""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode"]
