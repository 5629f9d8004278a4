"""What running a network does, and what is known to run one."""

from __future__ import annotations

from ampwise_lint.path.state import State
from ampwise_lint.source import library
from ampwise_lint.source.nodes import Node
from ampwise_lint.source.roles import LOSS
from ampwise_lint.values.abstract import Instance, Model, Value
from ampwise_lint.values.arguments import Arguments
from ampwise_lint.values.classes import is_network
from ampwise_lint.values.contents import flatten, origins
from ampwise_lint.values.events import Forward


def run(state: State, node: Node, network: Value, a: Arguments) -> None:
    """Note that a network runs."""
    is_root, is_training = not state.in_forward, not state.is_evaluating(network)
    state.emit(Forward, node, network, tuple(a.values), is_root, is_training)


def run_given(state: State, node: Node, a: Arguments) -> None:
    """Note the networks that ``compute_loss(model, batch)`` is given, and runs."""
    networks = [each for each in a.values if _is_run_by_losses(each)]
    if len(networks) < a.count and not is_run(a):
        for each in networks:
            run(state, node, each, a)


def is_run(a: Arguments) -> bool:
    """Whether a call is given what a network has returned already."""
    return any(each.forward for each in origins(*flatten(a.values)))


def _is_run_by_losses(value: Value) -> bool:
    if isinstance(value, Model):
        return not library.LOSS_LAYERS.match(value.path) and not LOSS.search(value.key)
    return isinstance(value, Instance) and is_network(value.class_)
