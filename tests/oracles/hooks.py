"""Ways in which a call of a module does more than its class's ``forward``."""

from torch.nn.modules import module as of_modules


def scaled(found):
    """Twice the outputs of a call; a recurrent module's state stays."""
    return (2 * found[0], *found[1:]) if isinstance(found, tuple) else 2 * found


def halved(gradients):
    return tuple(None if g is None else 0.5 * g for g in gradients)


def patched(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: scaled(forward(*args, **kwargs))


def called(module):
    kind = type(module)
    call = {"__call__": lambda self, *args: scaled(kind.__call__(self, *args))}
    module.__class__ = type(kind.__name__, (kind,), call)


def everywhere(register, hook):
    def change(module):
        def own(one, *rest):
            return hook(one, *rest) if one is module else None

        return getattr(of_modules, f"register_module_{register}")(own)

    return change


def on_it(register, hook):
    return lambda module: getattr(module, f"register_{register}")(hook)


HOOKS = {
    "forward pre-hook": ("forward_pre_hook", lambda _, x: (2 * x[0], *x[1:])),
    "forward hook": ("forward_hook", lambda _, __, y: scaled(y)),
    "full backward pre-hook": ("full_backward_pre_hook", lambda _, g: halved(g)),
    "backward hook": ("full_backward_hook", lambda _, g, __: halved(g)),
}
#: By what an error calls them: functions that change a module, and may return a handle.
CHANGES = {
    **{name: on_it(*hook) for name, hook in HOOKS.items()},
    **{f"{name} of all modules": everywhere(*hook) for name, hook in HOOKS.items()},
    "forward of its own": patched,
    "__call__ of its own": called,
}


class Changed:
    """A module that is changed within a block, where hooks of all modules are in force."""

    def __init__(self, name, module):
        self.handle = CHANGES[name](module)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.handle is not None:
            self.handle.remove()
