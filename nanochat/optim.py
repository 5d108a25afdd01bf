"""MuonAdamW: Muon for matrices and AdamW for everything else, in one class for any number of
processes.

**Muon** replaces the momentum of a matrix with the nearest semi-orthogonal matrix (all singular
values become 1), so every direction is learned at the same speed. The steps are Nesterov momentum
-> row equilibration -> Polar Express -> renormalization -> per-neuron variance reduction -> update
with cautious weight decay. Row equilibration (all row norms become their RMS, arXiv 2603.28254) and
renormalization (Frobenius norm sqrt(min(rows, cols)), arXiv 2602.21545) stay because nanochat's
learning rates were tuned with them.

**Sharding** (ZeRO, arXiv 1910.02054; reduce.py has a diagram). Flattened tensors are laid out in
messages of W equal chunks. Rank r owns chunk r of every message: only rank r keeps its optimizer
state and computes its update. A large AdamW tensor is cut between ranks, a matrix never is.

    step:  gradients -> reduce (sum) each message -> norm -> update own chunk -> all-gather
           reductions run while later messages are packed; gathers run during later updates

The update waits for all reductions because the global norm guards it: if any gradient is NaN or
infinite, no weight and no state changes, and the caller keeps the last good weights. The guard is a
0-dim tensor `live` that multiplies every rate: it is 1, or 0 if the step is skipped; zeros then
replace the gradient, too. So the host never waits for the device: it launches the whole step while
the backward pass is still running. To skip a step, the caller lowers `limit` to -1, which every
norm exceeds. On several ranks, a step needs memory for one more copy of the gradients.

**Stacks.** A step of a matrix is about 40 kernels, and a GPU runs many of them faster than the host
launches them: one by one, the 72 matrices of a d12 took 124 ms on an H200, whose kernels ran for
only 14 ms of these. So compiled code updates a stack of up to 8 matrices of one shape in one call,
whose products are batched. A CPU takes them one by one.

**Bits.** A step has the same bits for every W that divides the number of leaves: reduce.py fixes
the order of sums, a matrix is orthogonalized on one rank, the size of its stack depends on K and
not on W (`stack_size`), and elementwise updates use only operations whose vectorized and scalar
forms round alike (no `pow` with fractions, no `sigmoid`). The norm is added up from **grains**,
which chunks never cut: a grain is 1/64 of a tensor that may be cut; any other tensor is one grain.
Each rank enters the sums of squares of its own grains into a table, the tables are added exactly
(x + 0), and the summed entries are added in a fixed order.

State and arithmetic are float32, except that a model that computes in bfloat16 runs `polar_express`
in bfloat16. bfloat16 parameters are rounded when they are written back. For a bfloat16 embedding,
float32 state costs 8 bytes per element instead of 4, divided by W, but bfloat16 would often leave
exp_avg_sq unchanged: its relative change per step is often below bfloat16's resolution of 2**-8.
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.common import differences
from nanochat.dist import broadcast, on_rank0, wide_dtype
from nanochat.reduce import Message, Part, Reduce, lay_out, reduce_over_nodes

# ---- the arithmetic ------------------------------------------------------------------------------

# Quintics a X + b (X X^T) X + c (X X^T)^2 X, each optimal for the interval of singular values after
# the previous one: Polar Express (Amsel, Persson, Musco, Gower; arXiv 2505.16932), 5 steps, safety
# 2e-2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Lower bounds for norms in denominators, so that a zero matrix stays zero instead of becoming NaN.
# For gradients of about this size (small gates have them), the bounds also decide how far singular
# values are evened out. So they are nanochat's, like the learning rates.
NORM_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-10


def polar_express(G: Tensor, steps: int = 5) -> Tensor:
    """The approximate orthogonal polar factor of G: U V^T for G = U S V^T.

    G: a matrix (rows, cols) or a stack of them (num, rows, cols), float32 or bfloat16, of any
    scale. The result has the same shape and dtype, and is computed in that dtype. After 5 steps,
    singular values above 1e-3 of the Frobenius norm are within 0.14 of 1. Further steps repeat the
    last row of the table.
    """
    add_product = torch.addmm if G.ndim == 2 else torch.baddbmm
    tall = G.size(-2) > G.size(-1)
    X = G.mT if tall else G  # so the Gram matrix below is the smaller of the two
    wide = torch.promote_types(X.dtype, torch.float32)
    norm = X.norm(dim=(-2, -1), keepdim=True, dtype=wide)
    X = X / (norm * 1.01 + NORM_FLOOR).to(X.dtype)
    for step in range(steps):
        a, b, c = POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)]
        gram = X @ X.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        X = add_product(X, polynomial, X, beta=a)
    return X.mT if tall else X


def frobenius(matrices: Tensor) -> Tensor:
    """(..., rows, cols) -> (..., 1, 1): the Frobenius norm of each matrix."""
    return matrices.norm(dim=(-2, -1), keepdim=True)


def reduce_variance(
    update: Tensor, second_momentum_buffer: Tensor, *, weight: float | Tensor
) -> Tensor:
    """Divide each neuron of `update` by the running root mean square of its updates.

    The Frobenius norm stays. Source: NorMuon, arXiv 2510.05491.
    """
    dim = -1 if second_momentum_buffer.size(-1) == 1 else -2
    mean_square = update.square().mean(dim=dim, keepdim=True)
    second_momentum_buffer.add_((mean_square - second_momentum_buffer) * weight)
    scaled = update * second_momentum_buffer.clamp_min(VARIANCE_FLOOR).rsqrt()
    return scaled * (frobenius(update) / frobenius(scaled).clamp_min(VARIANCE_FLOOR))


def muon_update(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor,
    second_momentum_buffer: Tensor,
    *,
    lr: float | Tensor,
    momentum: float | Tensor,
    beta2: float,
    weight_decay: float | Tensor,
    grad_scale: Tensor,
    live: Tensor,
    ns_steps: int = 5,
    polar_dtype: torch.dtype = torch.float32,
) -> None:
    """One Muon step for a matrix or a stack of them, in place on `param` and both buffers.

    A pure function of its arguments. Source: https://kellerjordan.github.io/posts/muon/ and the
    papers cited above.
    """
    grad = (grad * grad_scale).masked_fill(live == 0, 0.0)
    momentum_buffer.add_((grad - momentum_buffer) * ((1 - momentum) * live))
    # Nesterov: the buffer after one more step with this gradient
    direction = grad + (momentum_buffer - grad) * momentum
    # row equilibration: each row gets the root mean square of the row norms
    norms = direction.norm(dim=-1, keepdim=True)
    mean_square = norms.square().mean(dim=-2, keepdim=True)
    direction = direction * (mean_square.sqrt() / norms.clamp_min(NORM_FLOOR))
    update = polar_express(direction.to(polar_dtype), ns_steps).float()
    rows, cols = update.shape[-2:]
    update = update * (math.sqrt(min(rows, cols)) / frobenius(update).clamp_min(NORM_FLOOR))
    update = reduce_variance(update, second_momentum_buffer, weight=(1 - beta2) * live)
    p = param.float()
    rate = lr * (max(1.0, rows / cols) ** 0.5) * live
    # cautious: weight decay applies to the elements that subtracting `update` also shrinks (arXiv
    # 2510.12402)
    decayed = p * (p * update >= 0)
    param.copy_(p - (update + decayed * weight_decay) * rate)


def muon_update_stack(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    second_momentum_buffers: list[Tensor],
    **settings: Any,
) -> None:
    """`muon_update` for several matrices of one shape: one call of each kernel for all of them."""
    param, grad = torch.stack(params), torch.stack(grads)
    momentum_buffer = torch.stack(momentum_buffers)
    second_momentum_buffer = torch.stack(second_momentum_buffers)
    muon_update(param, grad, momentum_buffer, second_momentum_buffer, **settings)
    torch._foreach_copy_(params, param.unbind())
    torch._foreach_copy_(momentum_buffers, momentum_buffer.unbind())
    torch._foreach_copy_(second_momentum_buffers, second_momentum_buffer.unbind())


def adamw_rates(
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: Tensor,
    live: Tensor,
) -> dict[str, Tensor]:
    """The scalars of `adamw_update` in step number `step` (1 for the first).

    0-dim float32 tensors on the device of `live`. If `live` is 0, all rates are 0.
    """

    def scalar(value: float) -> Tensor:
        return torch.full_like(live, value)

    def bias(beta: float) -> Tensor:
        """1 - beta ** step."""
        log_beta = math.log(beta) if beta else -math.inf
        return -torch.expm1(step * scalar(log_beta))

    beta1, beta2 = betas
    rate = scalar(lr) * live
    return {
        "weight1": scalar(1 - beta1) * live,
        "weight2": scalar(1 - beta2) * live,
        "bias2": bias(beta2),
        "eps": scalar(eps),
        "keep": 1 - rate * scalar(weight_decay),
        "rate": rate / bias(beta1),
    }


def adamw_update(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    weight1: Tensor,
    weight2: Tensor,
    bias2: Tensor,
    eps: Tensor,
    keep: Tensor,
    rate: Tensor,
    grad_scale: Tensor,
    live: Tensor,
) -> None:
    """One AdamW step, in place on `param` and both averages; a pure function of its arguments.

    Source: arXiv 1711.05101, with the formula of torch.optim.AdamW.

    param: any shape, float32 or bfloat16; the other three tensors: the same shape, float32. The
    gradient is multiplied by `grad_scale`; the other scalars come from `adamw_rates`.
    """
    # Temporaries are reused in place: allocating them would take a third of the time on a CPU.
    grad = (grad * grad_scale).masked_fill_(live == 0, 0.0)
    exp_avg.add_((grad - exp_avg).mul_(weight1))
    exp_avg_sq.add_(grad.square_().sub_(exp_avg_sq).mul_(weight2))
    denominator = (exp_avg_sq / bias2).sqrt_().add_(eps)
    param.copy_((param.float() * keep).sub_((exp_avg / denominator).mul_(rate)))


# ---- the optimizer -------------------------------------------------------------------------------

# Compiled (on CUDA), each matrix shape is one graph (two if W does not divide K: of a stack and of
# a single matrix), and all AdamW groups share three graphs (float32, bfloat16, a single element;
# ranks above 0 need a fourth), because values that differ between groups are passed as 0-dim
# tensors. Whatever AdamW needs beyond arithmetic and square roots is computed outside the graphs,
# once per group. AdamW's graphs round like eager code (`EAGER_ROUNDING`); otherwise Triton on CUDA
# would contract a product and a sum into one FMA, divide approximately and flush denormals. So
# compiled AdamW has the same bits as eager AdamW, except for the last bit of square roots on a CPU,
# which eager code takes from MKL. Compiled Muon differs from eager Muon: its norms and means sum in
# a different order, and on CUDA it uses FMAs. No promise about W depends on this, because every
# rank compiles the same code.
#
# Inductor's options for the rounding of eager code: no FMA, IEEE division, no flushed denormals.
# AdamW is bound by memory bandwidth, so this costs next to nothing.
EAGER_ROUNDING: dict[str, Any] = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
    "eager_numerics.disable_ftz": True,
}
# AdamW's temporaries stay in cache: 10 M elements take 63 ms in blocks, 211 ms at once
CPU_BLOCK = 1 << 17
NEEDED = {
    "adamw": ("lr", "betas", "eps", "weight_decay"),
    "muon": ("lr", "momentum", "ns_steps", "beta2", "weight_decay"),
}


def get_rank_and_world_size() -> tuple[int, int]:
    """Rank and world size of the default process group; (0, 1) without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextlib.contextmanager
def one_thread_each(threads: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that runs on this many CPU threads and yields results in order.

    Meanwhile, PyTorch uses one thread per operation: threads that share the product of two small
    matrices mostly wait for each other.
    """
    if threads == 1:
        yield map
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # each thread itself, because OpenMP gives a new one the default number, which rounds differently
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        torch.set_num_threads(before)


def state_shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """Shapes of the optimizer state of a part; flat if the part is not the whole parameter."""
    shape = tuple(part.param.shape)
    if part.group["kind"] == "adamw":
        n = part.stop - part.start
        if n < part.param.numel():
            shape = (n,)
        return {"exp_avg": shape, "exp_avg_sq": shape}
    rows, cols = shape
    of_neurons = (rows, 1) if rows >= cols else (1, cols)
    return {"momentum_buffer": shape, "second_momentum_buffer": of_neurons}


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW over parameter groups.

    State and work are sharded over the default process group, if any.

    param_groups: dicts with `kind` 'adamw' (lr, betas, eps, weight_decay) or 'muon' (lr, momentum,
    ns_steps, beta2, weight_decay; 2-D parameters only), `params` and their unique `names`, under
    which state is saved (default param_0, param_1, ...). `lr`, `weight_decay` and Muon's `momentum`
    may change at any time; `initial_lr` is the lr at construction unless given. Create the process
    group first, and pass the same groups on every rank.

    reduce: how gradients are added over ranks (default: inside torchrun's nodes, then across them).
    compiled: fuse each update with torch.compile (default: on CUDA); a model that needs more graphs
    than torch caches raises an error instead of slowing down. polar_dtype: the dtype of
    `polar_express`. num_leaves: K of a step (default: the number of processes); it decides the size
    of compiled stacks. Raises ValueError for an incomplete group.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        *,
        reduce: Reduce | None = None,
        compiled: bool | None = None,
        polar_dtype: torch.dtype = torch.float32,
        num_leaves: int | None = None,
    ) -> None:
        super().__init__(param_groups, defaults={})
        self._params = self._name_params()
        self._device = self._params[0].param.device
        self._rank, self._world_size = get_rank_and_world_size()
        self._reduce = reduce or reduce_over_nodes(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))

        # the updates
        if compiled is None:
            compiled = self._device.type == "cuda"
        self._polar_dtype = polar_dtype
        self._eager_on_cpu = self._device.type == "cpu" and not compiled
        self._muon_update = muon_update
        self._adamw_update = adamw_update
        if compiled:
            # fullgraph: exceeding torch's recompile_limit is an error
            self._muon_update = torch.compile(muon_update, dynamic=False, fullgraph=True)
            self._muon_update_stack = torch.compile(
                muon_update_stack, dynamic=False, fullgraph=True
            )
            self._adamw_update = torch.compile(
                adamw_update, dynamic=True, fullgraph=True, options=EAGER_ROUNDING
            )

        # the messages, this rank's part of each, and their state
        num_leaves = (num_leaves or self._world_size) if compiled else None
        self._messages = lay_out(self._params, self._world_size, num_leaves=num_leaves)
        self._mine = [message.parts[self._rank] for message in self._messages]
        self._steps = torch.zeros((), device=self._device)  # live steps, counted on the device
        for part in filter(None, self._mine):
            shapes = state_shapes(part)
            tensors = {key: torch.zeros(s, device=self._device) for key, s in shapes.items()}
            self.state[part.param] = tensors
        self._num_grains, self._grains = self._number_grains()

    def _number_grains(self) -> tuple[int, Tensor]:
        """(number of grains of all parameters, indices of this rank's grains in the order of
        parts)."""
        total = 0
        first: dict[str, int] = {}  # the index of each parameter's first grain
        for whole in self._params:
            first[whole.name] = total
            total += -(-whole.stop // whole.grain)
        mine: list[int] = []
        for part in filter(None, self._mine):
            for at in range(part.start, part.stop, part.grain):
                mine.append(first[part.name] + at // part.grain)
        return total, torch.tensor(mine, dtype=torch.int64, device=self._device)

    def _name_params(self) -> list[Part]:
        """All non-empty parameters in order, after checking and completing the groups."""
        parts: dict[str, Part] = {}
        for index, group in enumerate(self.param_groups):
            kind = group.get("kind", "")
            needed = NEEDED.get(kind, ["a known kind (adamw or muon)"])
            missing = [key for key in needed if key not in group]
            if missing:
                raise ValueError(f"parameter group {index} ({kind}) lacks {', '.join(missing)}")
            params = group["params"]
            group.setdefault("names", [f"param_{len(parts) + i}" for i in range(len(params))])
            group.setdefault("initial_lr", group["lr"])
            for name, param in zip(group["names"], params, strict=True):
                if kind == "muon" and param.ndim != 2:
                    raise ValueError(
                        f"{name}: Muon takes matrices, got shape {tuple(param.shape)}; use AdamW"
                    )
                if name in parts:
                    raise ValueError(f"parameter names are not unique: {name}")
                if not param.is_contiguous():
                    raise ValueError(
                        f"{name}: the tensor is not contiguous; pass tensor.contiguous()"
                    )
                parts[name] = Part(name, param, group, 0, param.numel())
        return [part for part in parts.values() if part.stop]

    # -- a step --

    @torch.no_grad()
    def step(  # type: ignore[override]
        self,
        grad_scale: float | Tensor = 1.0,
        *,
        max_norm: float = math.inf,
        limit: float | Tensor = math.inf,
    ) -> Tensor:
        """Add up the ranks' gradients, scale them, and update all parameters. Collective.

        Returns the L2 norm of the scaled gradient over all parameters: 0-dim float32, the same on
        every rank. A gradient whose norm exceeds `max_norm` is clipped to it. If the norm is NaN,
        infinite or above `limit`, no parameter, state or step count changes. A gradient of None
        counts as zeros.
        """
        # launch the sums of all messages
        reductions = []
        for message in self._messages:
            reductions.append(self._reduce(message.gradients(), self._rank, self._world_size))
        # wait for this rank's chunks; each pop frees the received parts
        chunks = [reductions.pop(0)() for _ in self._messages]

        # the global norm decides on the device whether this step is live, and how far it is clipped
        grad_scale = torch.as_tensor(grad_scale, dtype=torch.float32, device=self._device)
        norm = self._norm(chunks) * grad_scale.abs()
        live = (norm.isfinite() & (norm <= limit)).to(torch.float32)
        if max_norm < math.inf:
            grad_scale = grad_scale * (max_norm / norm).clamp(max=1.0)
        scalars = {}
        for group in self.param_groups:
            scalars[id(group)] = self._scalars(group, grad_scale, live)

        # launch the all-gather of each message as soon as its part is updated
        gathers = []
        pieces = list(zip(self._messages, self._mine, chunks))
        stacks = []
        while pieces:
            size = pieces[0][0].stack
            stacks.append(pieces[:size])
            del pieces[:size]
        update = partial(self._update_stack, scalars)
        with one_thread_each(torch.get_num_threads() if self._eager_on_cpu else 1) as map_updates:
            updated = chain.from_iterable(map_updates(update, stacks))
            for message, packed in zip(self._messages, updated):
                gathers.append(message.gather(packed, self._rank))

        # wait until every rank has all new parameters
        for finish in gathers:
            finish()
        self._steps += live
        return norm

    def _norm(self, chunks: list[Tensor]) -> Tensor:
        """The L2 norm over the chunks of all ranks, summed in float64 if the device supports it."""
        wide = wide_dtype(self._device)
        table = torch.zeros(self._num_grains, dtype=wide, device=self._device)
        grains: list[Tensor] = []
        for part, chunk in zip(self._mine, chunks):
            if part is not None:
                grains += chunk[: part.stop - part.start].split(part.grain)
        if grains:
            table[self._grains] = torch.stack(torch._foreach_norm(grains, dtype=wide)).square()
        if self._world_size > 1:
            dist.all_reduce(table)
        return table.sum().sqrt().float()

    def _scalars(self, group: dict[str, Any], grad_scale: Tensor, live: Tensor) -> dict[str, Any]:
        """The scalar arguments of a group's updates.

        Those that differ between groups or change with the schedule are 0-dim tensors, so that new
        values trigger no recompilation.
        """
        values = {key: group[key] for key in NEEDED[group["kind"]]}
        if group["kind"] == "adamw":
            values = adamw_rates(**values, step=self._steps + 1, live=live)
        else:
            for key in ("lr", "momentum", "weight_decay"):
                values[key] = torch.full_like(live, values[key])
        return {**values, "grad_scale": grad_scale, "live": live}

    @torch.no_grad()  # the grad mode is per thread
    def _update_stack(
        self,
        scalars: dict[int, dict[str, Any]],
        stack: list[tuple[Message, Part | None, Tensor]],
    ) -> list[Tensor]:
        """Update this rank's parts of messages; `scalars` are those of each group, by its id.

        Returns the messages of parameters, in which only these parts are up to date.
        """
        packed = []
        mine = []
        for message, part, chunk in stack:
            parameters = message.parameters()
            packed.append(parameters)
            if part is not None:
                size = part.stop - part.start
                param = parameters.split(message.chunk)[self._rank][:size]
                mine.append((part, param, chunk[:size]))
        if len(stack) == 1:
            for part, param, grad in mine:
                self._update(part, param, grad, **scalars[id(part.group)])
            return packed
        matrices = [self._matrix(*piece) for piece in mine]
        lists = [list(tensors) for tensors in zip(*matrices)]
        of_group = scalars[id(stack[0][0].first.group)]
        self._muon_update_stack(*lists, **of_group, polar_dtype=self._polar_dtype)
        return packed

    def _matrix(self, part: Part, param: Tensor, grad: Tensor) -> list[Tensor]:
        """The arguments of `muon_update` that belong to one matrix."""
        shape = part.param.shape
        return [param.view(shape), grad.view(shape), *self.state[part.param].values()]

    def _update(self, part: Part, param: Tensor, grad: Tensor, **scalars: Any) -> None:
        """Update a matrix, or this rank's elements of an AdamW tensor.

        `param` and `grad` are flat. `scalars`: those of the part's group.
        """
        if part.group["kind"] == "muon":
            matrix = self._matrix(part, param, grad)
            self._muon_update(*matrix, **scalars, polar_dtype=self._polar_dtype)
            return
        state = self.state[part.param].values()
        tensors = [param, grad, *(tensor.view(-1) for tensor in state)]
        block = CPU_BLOCK if self._device.type == "cpu" else len(param)
        for blocks in zip(*(tensor.split(block) for tensor in tensors)):
            # .data drops a view's link to its base; torch would compile another graph for each kind
            # of link
            self._adamw_update(*(tensor.data for tensor in blocks), **scalars)

    # -- saving and loading --

    @torch.no_grad()
    def gather_state(self) -> dict[str, Any]:
        """On rank 0, the whole state on the CPU, the same for every W; elsewhere {}. Collective.

        {"format": 1, "step": int, "state": {parameter name: {tensor name: float32 tensor}},
        "groups": [hyper-parameters and names]}. Tensors and plain values only; AdamW's tensors have
        the shape of their parameter.
        """
        is_root = self._rank == 0
        state: dict[str, dict[str, Tensor]] = {}
        for whole in self._params if is_root else ():
            shapes = state_shapes(whole)
            state[whole.name] = {key: torch.empty(shape) for key, shape in shapes.items()}

        for message, mine in zip(self._messages, self._mine):
            # one gather for each of the state's tensors, padded to the largest part
            by_rank = [state_shapes(part) if part else {} for part in message.parts]
            for key in max(by_rank, key=len):
                sizes = [math.prod(shapes[key]) if shapes else 0 for shapes in by_rank]
                sent = torch.zeros(max(sizes), device=self._device)
                if mine is not None:
                    sent[: sizes[self._rank]] = self.state[mine.param][key].view(-1)
                received = [sent]
                if self._world_size > 1:
                    received = [torch.empty_like(sent) for _ in sizes] if is_root else []
                    dist.gather(sent, received or None)
                # rank 0 puts the parts into the whole tensors
                for part, size, values in zip(message.parts, sizes, received):
                    if part is not None and is_root:
                        flat = state[part.name][key].view(-1)
                        flat[part.start : part.start + size].copy_(values[:size])

        if not is_root:
            return {}
        groups = []
        for group in self.param_groups:
            groups.append({key: value for key, value in group.items() if key != "params"})
        return {"format": 1, "step": int(self._steps), "groups": groups, "state": state}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Restore rank 0's `state`, which `gather_state` returned with any W. Collective.

        Its tensors are sent one by one, so other ranks hold at most their own parts and one tensor.

        Sets tensors and the step count, but not hyper-parameters. Raises ValueError, before any
        change, with a list of names and shapes that differ.
        """
        on_rank0(lambda: self._check_shapes(state))
        mine = {part.name: part for part in self._mine if part}
        for whole in self._params:
            for key, shape in state_shapes(whole).items():
                flat = torch.empty(math.prod(shape), device=self._device)
                if self._rank == 0:
                    flat.copy_(state["state"][whole.name][key].reshape(-1))
                broadcast(flat)
                part = mine.get(whole.name)
                if part is not None:
                    own = self.state[part.param][key].view(-1)
                    own.copy_(flat[part.start : part.start + len(own)])
        if self._rank == 0:
            self._steps.fill_(state["step"])
        broadcast(self._steps)

    def _check_shapes(self, state: dict[str, Any]) -> None:
        """ValueError if the state belongs to different parameters."""
        if state.get("format") != 1:
            raise ValueError(f"optimizer state: format {state.get('format')!r}, expected 1")
        expected: dict[str, tuple[int, ...] | str] = {}
        for whole in self._params:
            for key, shape in state_shapes(whole).items():
                expected[f"{whole.name}.{key}"] = shape
        actual: dict[str, tuple[int, ...] | str] = {}
        for name, tensors in state["state"].items():
            for key, tensor in tensors.items():
                actual[f"{name}.{key}"] = tuple(tensor.shape)

        different = [
            f"{key}: got {got}, expected {wanted}"
            for key, wanted, got in differences(expected, actual, missing="nothing")
        ]
        if different:
            raise ValueError(
                f"optimizer state does not fit this model: {'; '.join(different[:20])}"
            )

    def state_dict(self, *_: Any) -> NoReturn:
        """Refused, because it would contain only this rank's shard."""
        raise RuntimeError("MuonAdamW shards its state: use gather_state() and load_state()")

    load_state_dict = state_dict  # type: ignore[assignment]
