from types import SimpleNamespace

current_omni_platform = SimpleNamespace(is_cuda=lambda: False, is_musa=lambda: True)
