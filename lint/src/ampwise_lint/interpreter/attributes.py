"""What an attribute of a value is."""

from __future__ import annotations

import re

from ampwise_lint.interpreter.naming import as_loss, as_role, part_of
from ampwise_lint.path.state import Frame, State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import LOSS, OPTIMIZER, dotted
from ampwise_lint.torch_model import tensors
from ampwise_lint.values.abstract import (
    FALSE,
    TRUE,
    Bound,
    Class,
    Const,
    DictValue,
    Function,
    Gradient,
    Imported,
    Instance,
    Model,
    Optimizer,
    Parameter,
    Parameters,
    Ref,
    Scaler,
    Scope,
    Super,
    Tensor,
    Unknown,
    Value,
    key_of,
)
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_autograd_function, is_network

NETWORK_METHODS = {
    "parameters", "named_parameters", "train", "eval", "half", "bfloat16", "float", "to", "cuda",
    "cpu", "zero_grad", "state_dict", "load_state_dict", "requires_grad_", "apply", "double",
    "type", "clip_grad_norm_", "modules", "named_modules", "children", "named_children", "buffers",
    "named_buffers", "manual_backward", "clip_gradients",
}  # fmt: skip


OF_TENSORS = {
    "grad_fn", "is_leaf", "layout", "names", "itemsize", "nbytes", "output_nr", "retains_grad",
    "real", "imag", "is_sparse", "is_quantized", "is_meta", "is_cpu", "is_mps", "is_xpu",
}  # fmt: skip
"""What else tensors have: no tensors of their own."""


PLATFORM = {"os.name": Const("posix"), "sys.platform": Const("linux")}
"""Where training runs: what is there for Windows only is not what a job does."""


def attribute(state: State, node: Node, owner: Value, attr: str) -> Value:
    """An attribute of a value."""
    if isinstance(owner, Ref):  # torch.nn.functional.relu: most of all
        if attr == "value" and owner.value is not None:
            return owner.value
        path = library.canonical(f"{owner.path}.{attr}")
        return PLATFORM.get(path) or Ref(path)
    text = dotted(node)
    match owner:
        case Instance():
            return _of_instance(state, node, owner, attr)
        case Class():
            return _of_class(node, owner, attr)
        case DictValue(items=items) if attr in items:
            value = items[attr]
            if isinstance(value, Imported):
                value = items[attr] = state.resolve(value)
            return as_role(state, value, text)
        case DictValue(is_object=True):
            return as_role(state, Unknown(f"{key_of(owner)}.{attr}", "given", of=owner), text)
        case Const(value=str(device)) if attr == "type":
            return Const(device.partition(":")[0])
        case _ if attr == "grad" and isinstance(owner, Parameter | Unknown | Tensor | Model):
            return Gradient(owner)
        case Gradient() if attr == "data":
            return owner
        case Tensor() if attr in ("data", "T", "mT", "H"):
            return owner
        case Tensor() if attr == library.PACKED_SIZES:
            return tensors.packed_sizes(owner)
        case Tensor(op="max" | "min" | "sort") if attr == "values" and id(node) not in state.called:
            return owner
        case Tensor() if attr in ("shape", "ndim", "device", "dtype", "is_cuda", "requires_grad"):
            return Unknown(f"{key_of(owner)}.{attr}", of=owner)
        case Tensor(key=key) if f"attribute {key}.{attr}" in state.converted:
            return state.converted[f"attribute {key}.{attr}"]
        case Tensor() if (owner.forward or owner.data) and id(node) not in state.called:
            # ``output.logits``, ``output.loss``, ``batch.x``: a part of it
            return as_loss(owner) if LOSS.search(attr) else part_of(owner, attr)
        case Tensor(loss=True) if attr not in OF_TENSORS and id(node) not in state.called:
            return owner  # ``losses.total``: no tensor, but an object that holds some: each is one
        case Parameter() if attr == "data":
            return owner
        case Optimizer() if attr == "step_was_skipped":  # of one that Accelerate prepared
            return Unknown(f"{owner.key}.{attr}", of=owner)
        case Optimizer() if attr == "param_groups":
            return Parameters(owner, f"{owner.key}.param_groups")
        case Optimizer() if OPTIMIZER.search(attr) and id(node) not in state.called:
            return owner  # of a class of the project's own that holds torch's
        case Model(inner=inner) if attr == "module" and inner is not None:
            return inner
        case Model(key=key) if id(node) not in state.called and attr not in NETWORK_METHODS:
            return as_role(state, Unknown(f"{key}.{attr}", "given", of=owner), text)
        case Scaler() if attr in ("_scale", "_enabled"):
            return Unknown(f"{owner.key}.{attr}", scale=True)
        case Unknown():
            return _of_unknown(state, owner, attr, text)
        case Super():
            return _of_bases(owner, attr, node)
        case _:
            return Bound(owner, attr, node)


def _of_instance(state: State, node: Node, owner: Instance, attr: str) -> Value:
    text = dotted(node)
    class_, attributes = owner.class_, owner.attributes
    if attr in attributes and not _is_placeholder(state, class_, attributes[attr], attr, text):
        return as_role(state, attributes[attr], text)
    found = class_.lookup(attr)
    is_table = found is not None and isinstance(found[0], DictValue) and id(node) in state.called
    if is_table:  # a table of what a framework makes of it: a dict is not called
        found = None
    if found is not None and not _is_placeholder(state, class_, found[0], attr, text):
        return _inherited(state, node, owner, found[0], text)
    if attr in NETWORK_METHODS and is_network(class_):
        return Bound(owner, attr, node)
    if attr == "training" and is_network(class_):
        # In another method than forward, by what the network itself was told.
        trains = state.modes.get(key_of(owner)) if state.trains is None else state.trains
        if trains is not None:
            return TRUE if trains else FALSE
    if (made := _trainer_made_later(state, owner, attr)) is not None:
        return made
    return as_role(state, Unknown(f"self.{attr}", "given", of=owner), text)


def _trainer_made_later(state: State, owner: Instance, attr: str) -> Value | None:
    """An Accelerator or Fabric that another method makes: it runs the steps, whoever calls that."""
    for class_ in owner.class_.lineage():
        call = class_.module.assigned_in(class_.node).made.get(attr)
        if call is None or not library.WRAPPERS.match(class_.module.imports.full(call.func)):
            continue
        scope = Scope(class_.module, class_.scope)
        scope.names["self"] = owner
        with state.in_frame(Frame(None, scope)):
            made = state.evaluate(call, quiet=True)
        owner.attributes[attr] = made
        return made
    return None


ENUMS = ("Enum", "IntEnum", "StrEnum", "Flag")
SETTINGS = re.compile(r"(config|cfg|options?|args|arguments|settings|hparams)$", re.IGNORECASE)
"""Classes of settings: what they are set to is what they are until somebody wants another."""
OFF = (-1, 0, 1)
"""Numbers that switch something off; what others are is what they are mostly left at."""


def _is_placeholder(state: State, class_: Class, value: Value, attr: str, text: str) -> bool:
    """Whether an attribute is set to something else later: here, in a class derived, by a user."""
    if not isinstance(value, Const):
        return False
    is_choice = isinstance(value.value, bool | str) or value.value in OFF
    if is_choice and SETTINGS.search(class_.node.name):
        return True
    used = value.value is None and bool(state.here.roles.methods.get(text))
    assigned = [each.module.assigned_in(each.node) for each in class_.lineage()]
    is_chosen = any(attr in each.chosen for each in assigned)
    return (used and not is_chosen) or any(attr in each.later for each in assigned)


def _of_class(node: Node, owner: Class, attr: str) -> Value:
    if attr in owner.attributes and any(e.endswith(ENUMS) for e in owner.ancestors()[1:]):
        held = owner.attributes[attr]
        # A member is itself, and none of the others.
        return Ref(f"{owner.node.name}.{attr}", held if isinstance(held, Const) else None)
    if found := owner.lookup(attr):
        return found[0]
    if attr == "apply" and is_autograd_function(owner):
        return Bound(owner, attr, node)
    return Unknown(f"{owner.node.name}.{attr}", "given")


def _of_unknown(state: State, owner: Unknown, attr: str, text: str) -> Value:
    key = f"{owner.key}.{attr}"
    stored = state.converted.get(f"attribute {key}")
    if stored is not None:
        return stored
    made = "called" if owner.made == "called" else "given"
    found = Unknown(key, made, periodic=owner.periodic, loop=owner.loop, of=owner)
    return as_role(state, found, text)


def _of_bases(owner: Super, attr: str, node: Node) -> Value:
    for base in owner.class_.bases:
        if isinstance(base, Class) and (found := base.lookup(attr)) is not None:
            value = found[0]
            if isinstance(value, Function):
                return Function(value.node, value.module, value.scope, owner.owner, value.class_)
            return value
    return Bound(owner, attr, node)


def _inherited(state: State, node: Node, owner: Instance, found: Value, text: str) -> Value:
    """What an object's class holds under a name: a method is bound, a property is walked."""
    if not isinstance(found, Function):
        return as_role(state, found, text)
    function = found.node
    names = {dotted(each).rpartition(".")[2] for each in getattr(function, "decorator_list", [])}
    bound = Function(function, found.module, found.scope, owner, found.class_)
    if names & {"property", "cached_property"}:
        return state.call(bound, Arguments(), node)
    if "staticmethod" in names:
        return found
    return bound
