"""
MuonAdamW: Muon for matrices, AdamW for everything else, one class for one process and for many.

**Muon.** The momentum of a matrix is replaced by the nearest semi-orthogonal matrix (its singular
values become 1), so every direction is learned at the same speed. Here: Nesterov momentum -> row
equilibration -> Polar Express -> renormalization -> per-neuron variance reduction -> step with
cautious weight decay. Row equilibration (every row gets the mean row norm, arXiv 2603.28254) and
renormalization (Frobenius norm sqrt(min(rows, cols)), arXiv 2602.21545) are kept because nanochat's
learning rates were tuned with them.

**Who owns what** (ZeRO, arXiv 1910.02054; the layout is drawn in reduce.py). Flattened tensors are
laid out in messages of W equal chunks, and rank r owns chunk r of every message: it alone keeps
optimizer state for it and computes its update. A matrix is never cut, a large tensor of AdamW is.

    step:  backward's grads -> reduce (sum) each message -> norm -> update own chunk -> all-gather
           all reductions are in flight while the next is packed; gathers run during other updates

The update waits for all reductions because it is guarded by the global norm: with a NaN or inf
anywhere, no weight and no state changes, so the last good weights survive for the caller to find.
The guard is a 0-dim tensor `live` (1 or 0) that multiplies every rate (and the gradient is zeroed),
so the host never waits for the device: it has launched a whole step while the backward pass still
runs. A caller that wants no step scales the gradient by NaN. On several ranks all this needs room
for one copy of the gradients.

**Compiled** (on CUDA) each matrix shape is one graph, and AdamW is three for all groups (float32,
bfloat16, a single element; four on a rank whose parts begin inside a message), for everything that
differs between groups goes in as a 0-dim tensor. What is no plain multiplication, division or root
is computed outside of them, once a group. AdamW's graphs round as eager code does (`EAGER_ROUNDING`):
on CUDA, Triton would otherwise contract a product and a sum to one FMA, divide approximately and
flush denormals. So compiled AdamW has the bits of eager AdamW but, on a CPU, for the last bit of
roots, which eager takes from MKL. Compiled Muon does not have eager bits: it adds norms and means in
another order, and on CUDA it contracts. No promise about W depends on this, because every rank
compiles the same code.

**Bits.** A step is the same for every W that divides the number of leaves: reduce.py adds, a matrix
is orthogonalized alone, elementwise updates use only operations whose vectorized and scalar forms
round alike (no `pow` with fractions, no `sigmoid`). The norm is added up from **grains**, which no
chunk cuts: 1/64 of a tensor that may be cut, all of any other. Each rank fills its own into a table of
sums of squares, the tables are added exactly (x + 0), and then the table is summed in one order.

All state is float32, and so is all arithmetic but `polar_express`, which a model that computes in
bfloat16 does in bfloat16. bfloat16 parameters are written back by rounding. For a
bfloat16 embedding that costs 8 bytes an element instead of 4, divided by W, and keeps exp_avg_sq
alive: its relative change per step, 1 - beta2, is often below bfloat16's resolution of 2**-8.
"""

import math
import os
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.dist import on_rank0, share, wide_dtype
from nanochat.reduce import Part, Reduce, lay_out, reduce_over_nodes

# ---- the arithmetic ------------------------------------------------------------------------------

# Quintics a X + b (X X^T) X + c (X X^T)^2 X, each optimal for the interval that the one before it
# leaves: Polar Express (Amsel, Persson, Musco, Gower; arXiv 2505.16932), 5 steps, safety 2e-2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Floors of the norms that are divided by; they keep a zero matrix zero instead of NaN. They also
# decide how far the singular values of a gradient of this size (small gates have such) are evened
# out, so they are those of nanochat, for which the learning rates were tuned.
NORM_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-10


def polar_express(G: Tensor, steps: int = 5) -> Tensor:
    """The orthogonal polar factor of G, approximately: U V^T for G = U S V^T.

    G: (rows, cols), float32 or bfloat16, any scale; returns the same shape and dtype, computed in
    that dtype. After 5 steps singular values that were above 1e-3 of the Frobenius norm are within
    0.14 of 1; steps beyond the table repeat its last row.
    """
    tall = G.size(0) > G.size(1)
    X = G.mT if tall else G  # the Gram matrix below is then the small one
    wide = torch.promote_types(X.dtype, torch.float32)
    X = X / (X.norm(dim=(-2, -1), keepdim=True, dtype=wide) * 1.01 + NORM_FLOOR).to(X.dtype)
    for step in range(steps):
        a, b, c = POLAR_EXPRESS[min(step, len(POLAR_EXPRESS) - 1)]
        gram = X @ X.mT
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def equilibrate_rows(G: Tensor) -> Tensor:
    """Scale each row of G (rows, cols) to the root mean square of the row norms."""
    norms = G.norm(dim=1, keepdim=True)
    return G * (norms.square().mean().sqrt() / norms.clamp_min(NORM_FLOOR))


def reduce_variance(update: Tensor, second_momentum_buffer: Tensor, *,
                    weight: float | Tensor) -> Tensor:
    """Divide each neuron of `update` by the running root mean square of its updates; the Frobenius
    norm stays. Source: NorMuon, arXiv 2510.05491.

    update: (rows, cols) float32. A neuron is a row where rows >= cols, else a column. The buffer,
    (rows, 1) or (1, cols) float32, is its running mean square, moved in place by `weight`
    (1 - beta2) towards now.
    """
    dim = 1 if second_momentum_buffer.size(1) == 1 else 0
    mean_square = update.square().mean(dim=dim, keepdim=True)
    second_momentum_buffer.add_((mean_square - second_momentum_buffer) * weight)
    scaled = update * second_momentum_buffer.clamp_min(VARIANCE_FLOOR).rsqrt()
    return scaled * (update.norm() / scaled.norm().clamp_min(VARIANCE_FLOOR))


def cautious_decay(param: Tensor, update: Tensor) -> Tensor:
    """What weight decay pulls on: `param` where subtracting `update` shrinks it as well, else 0.
    Source: arXiv 2510.12402."""
    return param * (param * update >= 0)


def muon_update(param: Tensor, grad: Tensor, momentum_buffer: Tensor, second_momentum_buffer: Tensor, *,
                lr: float | Tensor, momentum: float | Tensor, beta2: float, weight_decay: float | Tensor,
                grad_scale: Tensor, live: Tensor, ns_steps: int = 5,
                polar_dtype: torch.dtype = torch.float32) -> None:
    """One Muon step for one matrix, in place on `param` and both buffers; depends on nothing but its
    arguments. Source: https://kellerjordan.github.io/posts/muon/ and the parts' papers.

    param: (rows, cols) float32 or bfloat16; grad and momentum_buffer: (rows, cols) float32;
    second_momentum_buffer: see `reduce_variance`. The gradient counts `grad_scale` times; where
    `live` is 0 nothing changes.
    """
    grad = (grad * grad_scale).masked_fill(live == 0, 0.0)
    momentum_buffer.add_((grad - momentum_buffer) * ((1 - momentum) * live))
    # Nesterov: where the buffer will be after one more step
    direction = grad + (momentum_buffer - grad) * momentum
    update = polar_express(equilibrate_rows(direction).to(polar_dtype), ns_steps).float()
    rows, cols = update.shape
    update = update * (math.sqrt(min(rows, cols)) / update.norm().clamp_min(NORM_FLOOR))
    update = reduce_variance(update, second_momentum_buffer, weight=(1 - beta2) * live)
    p = param.float()
    rate = lr * (max(1.0, rows / cols) ** 0.5) * live
    param.copy_(p - (update + cautious_decay(p, update) * weight_decay) * rate)


def adamw_rates(*, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
                step: Tensor, live: Tensor) -> dict[str, Tensor]:
    """What `adamw_update` multiplies and divides by in the step-th step, 1 for the first: 0-dim
    float32 tensors where `step` and `live` are. All rates are 0 where `live` is 0."""
    def scalar(value: float) -> Tensor:
        return torch.full_like(live, value)

    bias1, bias2 = (-torch.expm1(step * scalar(math.log(beta) if beta else -math.inf))
                    for beta in betas)
    rate = scalar(lr) * live
    return {"weight1": scalar(1 - betas[0]) * live, "weight2": scalar(1 - betas[1]) * live,
            "bias2": bias2, "eps": scalar(eps), "keep": 1 - rate * scalar(weight_decay),
            "rate": rate / bias1}


def adamw_update(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *,
                 weight1: Tensor, weight2: Tensor, bias2: Tensor, eps: Tensor, keep: Tensor,
                 rate: Tensor, grad_scale: Tensor, live: Tensor) -> None:
    """One AdamW step, in place on `param` and both averages; depends on nothing but its arguments.
    Source: arXiv 1711.05101, the same formula as torch.optim.AdamW.

    param: any shape, float32 or bfloat16; the other three the same shape, float32. The gradient
    counts `grad_scale` times; the other scalars are those of `adamw_rates`.
    """
    # Temporaries are reused in place: fresh memory takes a third of the time on a CPU.
    grad = (grad * grad_scale).masked_fill_(live == 0, 0.0)
    exp_avg.add_((grad - exp_avg).mul_(weight1))
    exp_avg_sq.add_(grad.square_().sub_(exp_avg_sq).mul_(weight2))
    denominator = (exp_avg_sq / bias2).sqrt_().add_(eps)
    param.copy_((param.float() * keep).sub_((exp_avg / denominator).mul_(rate)))


# ---- the optimizer -------------------------------------------------------------------------------

# Inductor's options for eager's own rounding: no FMA, IEEE division, no flushed denormals. AdamW is
# bound by memory, so this costs next to nothing.
EAGER_ROUNDING: dict[str, Any] = {"emulate_precision_casts": True, "eager_numerics.division_rounding": True,
                                  "eager_numerics.disable_ftz": True}
CPU_BLOCK = 1 << 17  # AdamW's temporaries stay in cache: 10 M elements take 63 ms, 211 ms whole
NEEDED = {"adamw": ("lr", "betas", "eps", "weight_decay"),
          "muon": ("lr", "momentum", "ns_steps", "beta2", "weight_decay")}


def get_rank_and_world_size() -> tuple[int, int]:
    """Of the default process group; (0, 1) where there is none."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def state_shapes(part: Part) -> dict[str, tuple[int, ...]]:
    """Shapes of the optimizer state of a part: flat where it is not all of its parameter."""
    shape = tuple(part.param.shape)
    if part.group["kind"] == "adamw":
        n = part.stop - part.start
        return dict.fromkeys(("exp_avg", "exp_avg_sq"),
                             shape if n == part.param.numel() else (n,))
    rows, cols = shape
    return {"momentum_buffer": shape,
            "second_momentum_buffer": (rows, 1) if rows >= cols else (1, cols)}


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW over parameter groups, with state and work sharded over the default process
    group (if any).

    param_groups: dicts with `kind` 'adamw' (lr, betas, eps, weight_decay) or 'muon' (lr, momentum,
    ns_steps, beta2, weight_decay; 2-D parameters only), `params` and, so that the state can be
    saved, their unique `names` (default param_0, param_1, ...). `lr`, `weight_decay` and Muon's
    `momentum` may be changed at any time; `initial_lr` is the lr at construction unless given.
    Every rank passes the same groups, after the process group exists.

    reduce: how gradients are added over ranks (default: by the nodes that torchrun tells of).
    compiled: fuse each update with torch.compile (default: on CUDA); a model that needs
    more graphs than torch keeps ends in an error, not in slow steps. polar_dtype: the type of
    `polar_express`. Raises ValueError for a group that lacks something.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *, reduce: Reduce | None = None,
                 compiled: bool | None = None, polar_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(param_groups, defaults={})
        self._params = self._name_params()
        self._device = self._params[0].param.device
        self._rank, self._world_size = get_rank_and_world_size()
        self._reduce = reduce or reduce_over_nodes(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        self._polar_dtype = polar_dtype
        self._muon_update, self._adamw_update = muon_update, adamw_update
        if self._device.type == "cuda" if compiled is None else compiled:
            # fullgraph: more variants than torch's recompile_limit are an error
            self._muon_update = torch.compile(muon_update, dynamic=False, fullgraph=True)
            self._adamw_update = torch.compile(adamw_update, dynamic=True, fullgraph=True, options=EAGER_ROUNDING)
        self._messages = lay_out(self._params, self._world_size)
        self._mine = [message.parts[self._rank] for message in self._messages]
        self._num_grains, self._grains = self._place_grains()
        # the count of steps is on the device: one that is not live does not count
        self._steps = torch.zeros((), device=self._device)
        for part in filter(None, self._mine):
            self.state[part.param] = {key: torch.zeros(shape, device=self._device)
                                      for key, shape in state_shapes(part).items()}

    def _name_params(self) -> list[Part]:
        """All non-empty parameters in order; checks and completes the groups."""
        found: dict[str, Part] = {}
        for index, group in enumerate(self.param_groups):
            kind, params = group.get("kind", ""), group["params"]
            if missing := [key for key in NEEDED.get(kind, ["a kind that is known"]) if key not in group]:
                raise ValueError(f"parameter group {index} ({kind}) lacks {', '.join(missing)}")
            group.setdefault("names", [f"param_{len(found) + i}" for i in range(len(params))])
            group.setdefault("initial_lr", group["lr"])
            for name, param in zip(group["names"], params, strict=True):
                if kind == "muon" and param.ndim != 2:
                    raise ValueError(f"{name}: Muon takes matrices, got shape "
                                     f"{tuple(param.shape)}; put it in adamw")
                if name in found:
                    raise ValueError(f"parameter names are not unique: {name}")
                if not param.is_contiguous():
                    raise ValueError(f"{name}: its elements do not lie side by side in memory")
                found[name] = Part(name, param, group, 0, param.numel())
        return [part for part in found.values() if part.stop]

    # -- a step --

    @torch.no_grad()
    def step(self, grad_scale: float | Tensor = 1.0, *,  # type: ignore[override]
             max_norm: float = math.inf, limit: float | Tensor = math.inf) -> Tensor:
        """Add the ranks' gradients, multiply them by `grad_scale`, update all parameters.

        Collective. Returns the L2 norm of that gradient over all parameters: 0-dim float32, the
        same on every rank. A longer one than `max_norm` is scaled down to it before it is used. If
        the norm is NaN, inf or above `limit`, no parameter, state or step count has changed. A
        gradient of None counts as zeros.
        """
        rank, world_size = self._rank, self._world_size
        reductions = [self._reduce(m.gradients(), rank, world_size) for m in self._messages]
        # what has arrived is let go as it is added
        chunks = [reductions.pop(0)() for _ in self._messages]
        grad_scale = torch.as_tensor(grad_scale, dtype=torch.float32, device=self._device)
        norm = self._norm(chunks) * grad_scale.abs()
        live = (norm.isfinite() & (norm <= limit)).to(torch.float32)
        if max_norm < math.inf:
            grad_scale = grad_scale * (max_norm / norm).clamp(max=1.0)
        scalars = {id(group): self._scalars(group, live) for group in self.param_groups}
        gathers = []
        for message, part, chunk in zip(self._messages, self._mine, chunks):
            packed = message.parameters()
            if part is not None:
                size = part.stop - part.start
                param = packed.split(message.chunk)[rank][:size]
                self._update(part, param, chunk[:size], grad_scale=grad_scale, live=live, **scalars[id(part.group)])
            gathers.append(message.gather(packed, rank))
        for finish in gathers:
            finish()
        self._steps += live
        return norm

    def _place_grains(self) -> tuple[int, Tensor]:
        """How many grains all parameters have, and which of them are this rank's, in the order of
        its parts."""
        first, num_grains = {}, 0  # of each parameter in the table
        for whole in self._params:
            first[whole.name] = num_grains
            num_grains += -(-whole.stop // whole.grain)
        mine = [first[part.name] + at // part.grain for part in self._mine if part
                for at in range(part.start, part.stop, part.grain)]
        return num_grains, torch.tensor(mine, dtype=torch.int64, device=self._device)

    def _norm(self, chunks: list[Tensor]) -> Tensor:
        """The L2 norm over the chunks of all ranks; sums in float64 where the device has it."""
        wide = wide_dtype(self._device)
        table = torch.zeros(self._num_grains, dtype=wide, device=self._device)
        grains = [grain for part, chunk in zip(self._mine, chunks) if part
                  for grain in chunk[:part.stop - part.start].split(part.grain)]
        if grains:
            table[self._grains] = torch.stack(torch._foreach_norm(grains, dtype=wide)).square()
        if self._world_size > 1:
            dist.all_reduce(table)
        return table.sum().sqrt().float()

    def _scalars(self, group: dict[str, Any], live: Tensor) -> dict[str, Any]:
        """What the updates of a group are given. What differs between groups, or what a schedule
        changes, goes in as 0-dim tensors, so that nothing is compiled again."""
        given = {key: group[key] for key in NEEDED[group["kind"]]}
        if group["kind"] == "adamw":
            return adamw_rates(**given, step=self._steps + 1, live=live)
        changing = ("lr", "momentum", "weight_decay")
        return given | {key: torch.full_like(live, given[key]) for key in changing}

    def _update(self, part: Part, param: Tensor, grad: Tensor, **scalars: Any) -> None:
        """Update a matrix, or what this rank owns of a tensor of AdamW: its elements and their gradient,
        both flat."""
        shape, state = part.param.shape, self.state[part.param]
        if part.group["kind"] == "muon":
            self._muon_update(param.view(shape), grad.view(shape), *state.values(), **scalars,
                              polar_dtype=self._polar_dtype)
            return
        tensors = [param, grad, *(tensor.view(-1) for tensor in state.values())]
        block = CPU_BLOCK if self._device.type == "cpu" else len(param)
        for blocks in zip(*(tensor.split(block) for tensor in tensors)):
            # data: without what a view knows of its base, for each kind of which it would be compiled again
            self._adamw_update(*(tensor.data for tensor in blocks), **scalars)

    # -- its state --

    @torch.no_grad()
    def gather_state(self) -> dict[str, Any]:
        """Collective. On rank 0 the whole state, on the CPU, with no trace of W; on others {}.

        {"format": 1, "step": int, "state": {parameter name: {tensor name: float32 tensor}},
        "groups": [hyper-parameters and names]}. Tensors and plain values only; AdamW's tensors have
        their parameter's shape.
        """
        # a GPU fills pinned memory at the full speed of the bus
        found = {whole.name: {key: torch.empty(shape, pin_memory=self._device.type == "cuda")
                              for key, shape in state_shapes(whole).items()}
                 for whole in self._params if self._rank == 0}
        for message, mine in zip(self._messages, self._mine):
            shapes = [state_shapes(part) if part else {} for part in message.parts]
            for key in max(shapes, key=len):
                sizes = [math.prod(shape[key]) if shape else 0 for shape in shapes]
                sent = torch.zeros(max(sizes), device=self._device)
                if mine is not None:
                    sent[:sizes[self._rank]] = self.state[mine.param][key].view(-1)
                received = [sent]
                if self._world_size > 1:
                    received = [torch.empty_like(sent) for _ in sizes] if self._rank == 0 else []
                    dist.gather(sent, received or None)
                for part, size, values in zip(message.parts, sizes, received):
                    if part is not None and found:
                        flat = found[part.name][key].view(-1)
                        flat[part.start:part.start + size].copy_(values[:size], non_blocking=True)
        step = int(self._steps)  # waits for the copies
        if self._rank != 0:
            return {}
        groups = [{key: value for key, value in group.items() if key != "params"}
                  for group in self.param_groups]
        return {"format": 1, "step": step, "groups": groups, "state": found}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Collective. Take what `gather_state` gave, on any W: rank 0's, whose tensors travel one
        by one, so that no other rank ever holds more than its own parts and one tensor.

        Sets tensors and the step count; hyper-parameters stay this run's own. Raises ValueError,
        before any change, with a list of names and shapes that differ.
        """
        on_rank0(lambda: self._check(state))
        mine = {part.name: part for part in self._mine if part}
        for whole in self._params:
            for key, shape in state_shapes(whole).items():
                flat = torch.empty(math.prod(shape), device=self._device)
                if self._rank == 0:
                    flat.copy_(state["state"][whole.name][key].reshape(-1))
                share(flat)
                if (part := mine.get(whole.name)) is not None:
                    own = self.state[part.param][key].view(-1)
                    own.copy_(flat[part.start:part.start + len(own)])
        if self._rank == 0:
            self._steps.fill_(state["step"])
        share(self._steps)

    def _check(self, state: dict[str, Any]) -> None:
        """ValueError for a state that is not of these parameters."""
        if state.get("format") != 1:
            raise ValueError(f"optimizer state: format {state.get('format')!r}, expected 1")
        want = {f"{whole.name}.{key}": shape for whole in self._params
                for key, shape in state_shapes(whole).items()}
        got = {f"{name}.{key}": tuple(tensor.shape) for name, tensors in state["state"].items()
               for key, tensor in tensors.items()}
        different = [f"{key}: got {got.get(key, 'nothing')}, expected {want.get(key, 'nothing')}"
                     for key in dict.fromkeys([*want, *got]) if got.get(key) != want.get(key)]
        if different:
            raise ValueError(f"optimizer state is not this model's: {'; '.join(different[:20])}")

    def state_dict(self, *_: Any) -> NoReturn:
        """Refused: it would hold this rank's shard only."""
        raise RuntimeError("MuonAdamW shards its state: use gather_state() and load_state()")

    load_state_dict = state_dict  # type: ignore[assignment]
