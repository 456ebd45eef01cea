"""Distributed autograd: contexts, nodes for tensors that are sent and received, and backward over several workers."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from distsim.debug.records import HostWait
from distsim.remote_calls.simulated.transport import Failed, RpcMessage, copied
from distsim.sim.isolation.process import require_task
from distsim.sim.kernel.scheduler import Event
from distsim.torch_compat.device import DISABLE_TORCH_DISPATCH

# -- Autograd contexts: what one worker knows of each, and which one a thread is in.

ID_BITS = 48
MOST_WORKERS = 65_535
NONE = -1

_here = threading.local()


class Send:
    """Autograd node of tensors that were sent to another worker, and to which their gradients return (torch's
    SendRpcBackward)."""

    def __init__(self, edges: list[Any]) -> None:
        self.edges = edges
        """`GradientEdge` of each tensor that requires a gradient."""
        self.arrived = False

    def name(self) -> str:
        return "torch::distributed::autograd::SendRpcBackward"

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple((edge.node, edge.output_nr) for edge in self.edges)


class Context:
    """`DistAutogradContext` of one worker."""

    def __init__(self, context_id: int) -> None:
        self.id = context_id
        self.sends: dict[int, Send] = {}
        self.recvs: dict[int, Any] = {}
        self.workers: dict[int, None] = {}
        """Workers to which the context was sent."""
        self.grads: dict[Tensor, Tensor] = {}
        self.backward: Any = None
        """The backward pass that is running (engine.Pass)."""

    def _context_id(self) -> int:
        return self.id

    def _send_functions(self) -> dict[int, Any]:
        return dict(self.sends)

    def _recv_functions(self) -> dict[int, Any]:
        return dict(self.recvs)

    def _known_worker_ids(self) -> set[int]:
        return set(self.workers)


class Container:
    """All autograd contexts of one worker."""

    def __init__(self) -> None:
        self.worker: int | None = None
        self.contexts: dict[int, Context] = {}
        self._next_id = self._next_message = self.max_id = 0

    def init(self, worker: int) -> None:
        if not 0 <= worker <= MOST_WORKERS:
            raise RuntimeError(f"worker_id needs to be in the range [0, {MOST_WORKERS}]")
        if self.worker is not None:
            if self.worker != worker:
                raise RuntimeError(
                    f"Container is already initialized with worker_id: {self.worker}, cannot initialize with different "
                    f"worker_id: {worker}"
                )
            return
        self.worker = worker
        self._next_id = self._next_message = worker << ID_BITS
        self.max_id = worker << ID_BITS | (1 << ID_BITS) - 1

    def ready(self) -> Container:
        if self.worker is None:
            raise RuntimeError("Need to initialize distributed autograd using torch.distributed.autograd.init()")
        return self

    @property
    def current_id(self) -> int:
        return int(getattr(_here, "context_id", NONE))

    def new_message_id(self) -> int:
        self._next_message += 1
        return self._next_message - 1

    def new_context(self) -> Context:
        if self.current_id != NONE:
            raise RuntimeError("Already have an autograd context id for this thread.")
        context = self.contexts[self._next_id] = Context(self._next_id)
        _here.context_id = self._next_id
        self._next_id += 1
        return context

    def retrieve(self, context_id: int) -> Context:
        result = self.contexts.get(context_id)
        if result is None:
            raise RuntimeError(f"Could not find autograd context with id: {context_id}")
        return result

    def current(self) -> Context:
        if self.current_id == NONE:
            raise RuntimeError(
                "Current thread doesn't have a valid autograd context. Please wrap your code using: "
                "`with torch.distributed.autograd.context() as context_id` to generate a valid context"
            )
        result = self.contexts.get(self.current_id)
        if result is None:
            raise RuntimeError("Couldn't find autograd context data for current autograd context id")
        return result

    def erase(self, context_id: int) -> None:
        self.contexts.pop(context_id, None)
        if self.current_id == context_id:
            _here.context_id = NONE

    @contextlib.contextmanager
    def entered(self, context_id: int | None) -> Iterator[None]:
        """Return a context in which the running thread serves a request of that autograd context."""
        if context_id is None:
            yield
            return
        before = self.current_id
        _here.context_id = context_id
        try:
            yield
        finally:
            _here.context_id = before


# -- Backward over several workers: torch's FAST mode.
#
# Each worker has the part of the graph between what came and what it sent. torch's engine runs a part at once where
# all that leads to it is there; of a part where some gradient is still to come, what can run runs, and the rest keeps
# what it has until then. So every node runs once, with its sum of gradients, as in torch's own distributed engine.

Done = Callable[["Exception | None"], None]
_ACCUMULATE = "AccumulateGrad"


class Pass:
    """One backward pass of a context on one worker. *done* is called once, with the error if there was one."""

    def __init__(self, agent: Any, context: Context, retain_graph: bool, roots: Sequence[Any], done: Done) -> None:
        self.agent = agent
        self.context = context
        self.retain_graph = retain_graph
        self._done: Done | None = done
        self._outstanding = 0
        self._to_come = len(context.sends) + bool(roots)
        self._left: dict[Any, int] = {}
        """For each node the number of incoming edges that have not brought a gradient yet."""
        self._held: dict[Any, dict[int, list[Tensor]]] = {}
        """Gradients at nodes that wait for more of them: by input."""
        self._leaves: dict[Tensor, None] = {}
        """Leaves that have run: DDP writes the gradients of all its parameters when the last of them has."""
        starts = [edge for send in context.sends.values() for edge in send.edges]
        todo = [(edge.node, edge.output_nr) for edge in (*starts, *roots)]
        while todo:
            node, _ = todo.pop()
            if node is None:
                continue
            if node in self._left:
                self._left[node] += 1
            else:
                self._left[node] = 1
                todo += node.next_functions

    def run(self, edges: Sequence[Any], grads: Sequence[Tensor]) -> None:
        """Run the nodes that can run, once the gradients of *edges* are known."""
        entered: list[Any] = []
        for edge, grad in zip(edges, grads, strict=True):
            self._held.setdefault(edge.node, {}).setdefault(edge.output_nr, []).append(grad)
            self._left[edge.node] -= 1
            if not self._left[edge.node]:
                entered.append(edge.node)
        inside, boundary = self._ready(entered)
        if entered:
            outputs, given = [], []
            for node in entered:
                for number, held in self._held.pop(node, {}).items():
                    outputs += [GradientEdge(node, number)] * len(held)
                    given += held
            self._engine(inside, boundary, outputs, given)
        self._to_come -= 1
        self._look()

    def _ready(self, entered: list[Any]) -> tuple[list[Any], list[tuple[Any, int]]]:
        """Return all nodes that can run now, and their edges to nodes that cannot."""
        inside, edges = list(entered), []
        for node in inside:  # it grows
            for after, number in node.next_functions:
                if after is None:
                    continue
                edges.append((after, number))
                self._left[after] -= 1
                if not self._left[after]:
                    inside.append(after)
        known = set(inside)
        for node in inside:  # what it held already comes to it with the rest
            if node not in entered and node in self._held:
                entered.append(node)
        return inside, list(dict.fromkeys(edge for edge in edges if edge[0] not in known))

    def _engine(
        self, inside: list[Any], boundary: list[tuple[Any, int]], outputs: list[Any], given: list[Tensor]
    ) -> None:
        leaves = [node for node in inside if node.name().endswith(_ACCUMULATE)]
        self._leaves.update(dict.fromkeys(node.variable for node in leaves))
        kept = {variable: variable.grad for variable in self._leaves}
        for variable in kept:
            variable.grad = self.context.grads.get(variable)
        try:
            if boundary:
                cut = self._cut if _apart(boundary) else self._by_hand
                outputs, given = cut(inside, leaves, boundary, outputs, given)
            if outputs:
                torch.autograd.backward(outputs, given, retain_graph=self.retain_graph)
        finally:
            for variable, before in kept.items():
                if variable.grad is not None:
                    self.context.grads[variable] = variable.grad
                variable.grad = before

    def _cut(
        self,
        inside: list[Any],
        leaves: list[Any],
        boundary: list[tuple[Any, int]],
        outputs: list[Any],
        given: list[Tensor],
    ) -> tuple[list[Any], list[Tensor]]:
        """Run the nodes *inside* with torch's engine up to the *boundary*, and return the gradients of leaves."""
        leaf_edges = [GradientEdge(node, 0) for node in leaves]
        wanted = [*leaf_edges, *(GradientEdge(*edge) for edge in boundary)]
        gradients = torch.autograd.grad(outputs, wanted, given, retain_graph=self.retain_graph, allow_unused=True)
        for (node, number), grad in zip(boundary, gradients[len(leaves) :], strict=True):
            if grad is not None:
                self._held.setdefault(node, {}).setdefault(number, []).append(grad)
        pairs = [(edge, grad) for edge, grad in zip(leaf_edges, gradients, strict=False) if grad is not None]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]

    def _by_hand(
        self,
        inside: list[Any],
        leaves: list[Any],
        boundary: list[tuple[Any, int]],
        outputs: list[Any],
        given: list[Tensor],
    ) -> tuple[list[Any], list[Tensor]]:
        """Run the nodes one by one if a node of the boundary leads to another, which torch's engine would run as
        well.

        A hook on a tensor between two nodes is not called.
        """
        held: dict[Any, dict[int, list[Tensor]]] = {}
        for edge, grad in zip(outputs, given, strict=True):
            held.setdefault(edge.node, {}).setdefault(edge.output_nr, []).append(grad)
        outside = {node for node, _ in boundary}
        final = set(leaves)
        with torch.no_grad():
            for node in inside:  # _ready lists a node after all that lead to it
                if node in final or node not in held:
                    continue
                came = held.pop(node)
                sums = [_sum(came.get(i, ())) for i in range(len(node._input_metadata))]
                for (after, number), grad in zip(node.next_functions, _called(node, sums), strict=True):
                    if after is None or grad is None:
                        continue
                    target = self._held if after in outside else held
                    target.setdefault(after, {}).setdefault(number, []).append(_fitted(grad, after, number))
        edges = [(GradientEdge(node, 0), _sum(held[node][0])) for node in leaves if node in held]
        return [edge for edge, _ in edges], [grad for _, grad in edges if grad is not None]

    # -- the other workers' parts

    def propagate(self, message: RpcMessage, grads: Sequence[Tensor]) -> None:
        """Send the gradients of the tensors in *message* to their sender."""
        self._outstanding += 1
        back = RpcMessage(
            "BACKWARD_AUTOGRAD_REQ",
            tensors=copied(grads),
            fields=(self.context.id, message.autograd_id, self.retain_graph),
        )

        def answered(reply: RpcMessage | Failed) -> None:
            self._outstanding -= 1
            if isinstance(reply, Failed):
                self.end(reply.error)
            self._look()

        self.agent.send(message.sender, back, answered)

    def _look(self) -> None:
        if not self._outstanding and not self._to_come:
            self.end(None)

    def end(self, error: Exception | None) -> None:
        done, self._done = self._done, None
        if done is not None:
            if self.context.backward is self:
                self.context.backward = None
            done(error)


def _apart(boundary: Sequence[tuple[Any, int]]) -> bool:
    """Return whether no node of the boundary leads to another."""
    ends = {node for node, _ in boundary}
    if len(ends) < 2:
        return True
    seen: set[Any] = set()
    todo = [after for node in ends for after, _ in node.next_functions]
    while todo:
        node = todo.pop()
        if node in ends:
            return False
        if node is not None and node not in seen:
            seen.add(node)
            todo += [after for after, _ in node.next_functions]
    return True


def _sum(grads: Sequence[Tensor]) -> Tensor | None:
    return functools.reduce(torch.add, grads) if grads else None


def _called(node: Any, grads: list[Tensor | None]) -> Sequence[Tensor | None]:
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        if not hasattr(node, "origin"):
            metas = node._input_metadata
            grads = [
                torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
                for grad, meta in zip(grads, metas, strict=True)
            ]
        gradients = node.apply(*grads)
        gradients = list(gradients if isinstance(gradients, tuple) else (gradients,))
        return [*gradients, *[None] * len(node.next_functions)][: len(node.next_functions)]
    gradients = node(*grads)
    return gradients if isinstance(gradients, tuple) else (gradients,)


def _fitted(grad: Tensor, node: Any, number: int) -> Tensor:
    """Fit a gradient as torch's engine does: sum over broadcast dimensions, and cast to the input's type."""
    meta = node._input_metadata[number] if node._input_metadata else None
    if meta is None or grad.is_sparse:
        return grad
    return grad.sum_to_size(meta.shape).to(meta.dtype)


@contextmanager
def label(name: str) -> Iterator[None]:
    """Return a context that labels work in a profile of this process."""
    task = require_task()
    begun_s = task.now_s()
    yield
    recorder = task.process.observers.recorder
    if recorder is not None:
        recorder.operator(name, begun_s, task.now_s() - begun_s, ())


def came_back(context: Context, message: RpcMessage, grads: Sequence[Tensor]) -> None:
    """Continue with the sender's part: torch's engine has reached a node at which tensors were received."""
    if context.backward is None:
        raise RuntimeError("RecvRpcBackward: the autograd context is no longer valid. Use dist_autograd.backward")
    context.backward.propagate(message, grads)


def _on_node(container: Container, error: Exception) -> RuntimeError:
    text = str(error)
    return RuntimeError(f"Error on Node {container.worker}: {text}")


def execute(container: Container, agent: Any, context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> None:
    """Implement `dist_autograd.backward`."""
    with label("torch::distributed::autograd::backward"):
        _execute(container, agent, context_id, roots, retain_graph)


def _execute(container: Container, agent: Any, context_id: int, roots: Sequence[Tensor], retain_graph: bool) -> None:
    context = container.ready().retrieve(context_id)
    if not roots:
        raise RuntimeError("No tensors provided for gradient computation.")
    for root in roots:
        if not root.requires_grad:
            raise RuntimeError("requires_grad not set on root")
        if root.numel() != 1:
            raise RuntimeError(f"{_name(root)} is not a scalar, all roots need to be scalar")
        if root.grad_fn is None:
            raise RuntimeError(f"{_name(root)} does not have a valid gradient function.")
    if context.backward is not None:
        raise RuntimeError("Cannot set GraphTask multiple times for the same autograd context")
    task = require_task()
    ended: Event = task.port.event()
    errors: list[Exception] = []

    def done(error: Exception | None) -> None:
        if error is not None:
            errors.append(error)
        if not ended.triggered:
            ended.succeed()

    edges = [torch.autograd.graph.get_gradient_edge(root) for root in roots]
    current = context.backward = Pass(agent, context, retain_graph, edges, done)
    try:
        current.run(edges, [torch.ones_like(root, memory_format=torch.legacy_contiguous_format) for root in roots])
    except Exception as error:
        current.end(error)
    if not ended.processed:
        task.wait(
            ended,
            HostWait(
                "dist_autograd.backward: the other workers' gradients",
                tuple(sorted(agent.rank_of(worker) for worker in context.workers)),
            ),
        )
    if errors:
        raise _on_node(container, errors[0])


def _name(root: Tensor) -> str:
    return str(getattr(root, "name", None) or "")


def gradients_came(container: Container, agent: Any, message: RpcMessage, done: Done) -> None:
    """Handle gradients of tensors that this worker sent. *done* is called when all that follows from them is done."""
    context_id, autograd_id, retain_graph = message.fields
    context = container.retrieve(context_id)
    send: Send | None = context.sends.get(autograd_id)
    if send is None:
        raise RuntimeError(f"Could not find send function for autograd message id: {autograd_id}")
    if context.backward is None:

        def ended(error: Exception | None) -> None:
            done(None if error is None else _on_node(container, error))

        context.backward = Pass(agent, context, retain_graph, (), ended)
        answer = None
    else:
        answer = done
    current: Pass = context.backward
    try:
        with label("torch::distributed::autograd::SendRpcBackward"):
            current.run(send.edges, list(message.tensors))
    except Exception as error:
        current.end(error)
    if answer is not None:
        answer(None)


# -- Where a tensor leaves a worker and where it comes: the nodes that lead its gradient back.

_DisableTorchDispatch = DISABLE_TORCH_DISPATCH.get()


class _Recv(torch.autograd.Function):
    """Autograd node of received tensors, which sends their gradients to the sender."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, origin: tuple[Context, RpcMessage], tensors: list[Tensor]) -> Any:
        ctx.origin = origin
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        context, message = ctx.origin
        known = [
            torch.zeros(meta.shape, dtype=meta.dtype, device=meta.device) if grad is None else grad
            for grad, meta in zip(grads, ctx._input_metadata, strict=True)
        ]
        with label("torch::distributed::autograd::RecvRpcBackward"):
            came_back(context, message, known)
        return None, None, None


_Recv.__name__ = _Recv.__qualname__ = "torch::distributed::autograd::RecvRpc"
_Recv._backward_cls.__name__ = "torch::distributed::autograd::RecvRpcBackward"


def _edge(tensor: Tensor) -> Any:
    with torch.enable_grad(), _DisableTorchDispatch():
        if tensor.layout is torch.strided:
            return get_gradient_edge(tensor)
        token = tensor.clone().grad_fn  # torch's way is a view, which no sparse tensor has
        assert token is not None
        return GradientEdge(*token.next_functions[0], token)


def attach(container: Container, message: RpcMessage, tensors: Sequence[Tensor], to: int, forced: bool) -> None:
    """Attach the autograd context to *message*, and remember where the gradients of its *tensors* go."""
    asks = [tensor for tensor in tensors if tensor.requires_grad]
    if container.current_id == NONE or (not forced and not asks):
        return
    context = container.current()
    message.context_id, message.autograd_id = context.id, container.new_message_id()
    if asks:
        context.sends[message.autograd_id] = Send([_edge(tensor) for tensor in asks])
    context.workers[to] = None


def received(container: Container, message: RpcMessage) -> list[Tensor]:
    """Return the tensors of *message*, with a node behind those that require a gradient."""
    tensors = list(message.tensors)
    asks = [i for i, wanted in enumerate(message.wants_grad) if wanted]
    if message.context_id is None:
        for i in asks:
            tensors[i].requires_grad_()
        return tensors
    context = container.contexts.setdefault(message.context_id, Context(message.context_id))
    if asks:
        with torch.enable_grad(), _DisableTorchDispatch():
            dummy = torch.empty(0, requires_grad=True)
            fresh = _Recv.apply(dummy, (context, message), [tensors[i] for i in asks])
        for i, tensor in zip(asks, fresh, strict=True):
            tensors[i] = tensor
        context.recvs[message.autograd_id] = fresh[0].grad_fn
    return tensors


def release(container: Container, agent: Any, context_id: int) -> None:
    """Implement the end of `dist_autograd.context`."""
    container.retrieve(context_id)
    release_if_there(container, agent, context_id)


def release_if_there(container: Container, agent: Any, context_id: int) -> None:
    """Release a context, unless another worker already did."""
    context = container.contexts.get(context_id)
    if context is None:
        return
    workers = list(context.workers)
    container.erase(context_id)
    if agent is not None:
        for worker in workers:
            agent.tell(worker, RpcMessage("CLEANUP_AUTOGRAD_CONTEXT_REQ", fields=context_id))
