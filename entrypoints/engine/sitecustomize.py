"""Let torchvision be imported beside a CPU build of torch, in every process that has this folder on PYTHONPATH.

The published torchvision is built for CUDA. Where its extension cannot be loaded, two of its operators are not
declared, and importing torchvision, and with it transformers and vLLM, fails on them. Nobody calls them here:
declaring them is enough. Where the extension was loaded, nothing is done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class DeclareOperators(MetaPathFinder):
    """Acts when torchvision, having tried to load its extension, goes on to import what needs the operators."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Never finds anything: the module itself comes from where it always does."""
        if name == "torchvision._meta_registrations":
            sys.meta_path.remove(self)
            if not sys.modules["torchvision.extension"]._has_ops():
                import torch

                library: Any = torch.library
                self.declared = library.Library("torchvision", "DEF")  # for as long as it lives
                for operator in ("nms", "qnms"):
                    self.declared.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


operators = DeclareOperators()
sys.meta_path.insert(0, operators)
