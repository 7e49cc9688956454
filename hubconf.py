"""Entry points for torch.hub: `torch.hub.load(REPOSITORY, "veca_small", weights="weights.safetensors")`.

One for each named size. They need nothing installed but what `dependencies` lists.
"""

import sys as _sys
import warnings as _warnings
from pathlib import Path as _Path

dependencies = ["torch", "safetensors", "PIL", "numpy"]

_sys.path.insert(0, str(_Path(__file__).parent / "src"))
try:
    import veca as _veca
finally:
    _sys.path.pop(0)


def _entry(name):
    def create(weights=None, **fields):
        if weights is None:
            has_weights = any(each.startswith(f"{name}.") for each in _veca.list_models(pretrained=True))
            if has_weights and set(fields) <= {"num_classes"}:
                return _veca.create_model(name, pretrained=True, **fields).eval()
            _warnings.warn(f"{name} has random weights; pass weights=FILE for trained ones", stacklevel=2)
            return _veca.create_model(name, **fields).eval()
        if fields:
            raise ValueError(f"fields {', '.join(fields)} come from {weights}; leave them or the weights out")
        model = _veca.load(weights)
        size = _veca.config.size_name(model.config)
        if size != name:
            raise ValueError(
                f"{weights} holds {size or 'a model of no named size'}, not {name}; load it with veca.load"
            )
        return model

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"""{name}, in eval mode: `model(images, cores=C)`.

    weights: a file or folder that `veca.load` takes, or a full name of pretrained weights; None: the pretrained ones of
    this size, or random ones. Without weights, `fields` are those of `veca.VecaConfig`; with any but num_classes they
    are random.
    """
    return create


for _name in _veca.list_models():
    globals()[_name] = _entry(_name)
