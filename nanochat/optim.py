"""
MuonAdamW: Muon for matrices, AdamW for everything else, one class for one process and for many.

**Muon.** The momentum of a matrix is replaced by the nearest semi-orthogonal matrix (its singular values become 1), so
every direction is learned at the same speed. Here: Nesterov momentum -> row equilibration -> Polar Express ->
renormalization -> per-neuron variance reduction -> step with cautious weight decay. Row equilibration (every row gets
the mean row norm, arXiv 2603.28254) and renormalization (Frobenius norm sqrt(min(rows, cols)), arXiv 2602.21545) are a
line each and kept because nanochat's learning rates were tuned with them.

**Who owns what** (ZeRO, arXiv 1910.02054; messages.py). Flattened tensors are laid out in messages of W equal chunks;
rank r owns chunk r of every message: it alone keeps optimizer state for it, and computes its update. A matrix is never
cut, a large tensor of AdamW is.

    step:  backward's grads -> reduce (sum) of each message -> norm -> update own chunk -> all-gather of the message
           all reductions are in flight while the next is packed;  gathers run while the next chunk is updated

The update waits for all reductions because it is guarded by the global norm: with a NaN or inf anywhere, no weight and
no state changes, so the last good weights survive for the caller to find. The guard is a 0-dim tensor `live` (1 or 0)
that multiplies every rate (and the gradient is zeroed), so neither the guard nor the norm makes the host wait for the
device. On more than one rank all of this needs room for one copy of the gradients.

Invariants, which make a step the same bits for every W that divides the number of leaves: gradients are added by
reduce.py alone, in float32. A matrix is orthogonalized alone, from a fresh aligned copy, so its result does not know
how many matrices a rank owns. Elementwise updates use only operations whose vectorized and scalar forms round alike (no
`pow` with fractions, no `sigmoid`), so on a CPU they do not know where a chunk was cut. The norm is added up from
**grains**, which no chunk cuts: a table of their sums of squares in float64, of which each rank fills in its own, is
added exactly (x + 0) and then summed in one order.

Types: parameters float32 or bfloat16; all arithmetic and all state in float32, bfloat16 parameters are written back by
rounding. float32 state costs a bfloat16 embedding 8 bytes an element instead of 4, divided by W, and keeps exp_avg_sq
alive: its relative change per step, 1 - beta2, is often below bfloat16's resolution of 2**-8. Gradients are added over
ranks in float32 for the same reason.
"""

import math
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from nanochat.dist import get_compute_dtype, wide_dtype
from nanochat.messages import Member, Message, Piece, cut_at_grains, deal_whole
from nanochat.reduce import Reduce, tree_reduce

# ---- the arithmetic -------------------------------------------------------------------------------------------------

# Quintics a X + b (X X^T) X + c (X X^T)^2 X, each optimal for the interval that the one before it leaves: Polar Express
# (Amsel, Persson, Musco, Gower; arXiv 2505.16932) for 5 iterations, safety factor 2e-2.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
# Floors of the norms that are divided by; they keep a zero matrix zero instead of NaN. They also decide how far the
# singular values of a gradient of this size (small gates have such) are evened out, so they are those of nanochat, for
# which the learning rates were tuned.
NORM_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-10


def polar_express(G: Tensor, steps: int = 5) -> Tensor:
    """The orthogonal polar factor of G, approximately: U V^T for G = U S V^T, with singular values near 1.

    G: (rows, cols) float32 or bfloat16, any scale; returns the same shape and dtype, computed in that dtype. After 5
    steps singular values that were above 1e-3 of the Frobenius norm are within 0.14 of 1; steps beyond the table repeat
    its last row. Source: arXiv 2505.16932.
    """
    tall = G.size(0) > G.size(1)
    X = G.mT if tall else G  # the Gram matrix below is then the small one
    X = X / (X.norm(dtype=torch.float32) * 1.01 + NORM_FLOOR).to(X.dtype)
    for a, b, c in POLAR_EXPRESS[:steps] + POLAR_EXPRESS[-1:] * (steps - len(POLAR_EXPRESS)):
        gram = X @ X.mT
        X = torch.addmm(X, torch.addmm(gram, gram, gram, beta=b, alpha=c), X, beta=a)
    return X.mT if tall else X


def equilibrate_rows(G: Tensor) -> Tensor:
    """Scale each row of G (rows, cols) to the root mean square of the row norms. Source: MuonEq, arXiv 2603.28254."""
    norms = G.norm(dim=1, keepdim=True)
    return G * (norms.square().mean().sqrt() / norms.clamp_min(NORM_FLOOR))


def reduce_variance(update: Tensor, second_momentum_buffer: Tensor, *, weight: float | Tensor) -> Tensor:
    """Divide each neuron of `update` by the running root mean square of its updates; the Frobenius norm stays.

    update: (rows, cols) float32. A neuron is a row where rows >= cols, else a column; second_momentum_buffer,
    (rows, 1) or (1, cols) float32, is its running mean square, moved in place by `weight` (1 - beta2) towards now.
    Source: NorMuon, arXiv 2510.05491.
    """
    mean_square = update.square().mean(dim=1 if second_momentum_buffer.size(1) == 1 else 0, keepdim=True)
    second_momentum_buffer.add_((mean_square - second_momentum_buffer) * weight)
    scaled = update * second_momentum_buffer.clamp_min(VARIANCE_FLOOR).rsqrt()
    return scaled * (update.norm() / scaled.norm().clamp_min(VARIANCE_FLOOR))


def cautious_decay(param: Tensor, update: Tensor) -> Tensor:
    """What weight decay pulls on: `param` where subtracting `update` shrinks it as well, else 0. arXiv 2510.12402."""
    return param * (param * update >= 0)


def muon_update(param: Tensor, grad: Tensor, momentum_buffer: Tensor, second_momentum_buffer: Tensor, *,
                lr: float | Tensor, momentum: float | Tensor, beta2: float, weight_decay: float | Tensor,
                ns_steps: int = 5, live: float | Tensor = 1.0, polar_dtype: torch.dtype = torch.float32) -> None:
    """One Muon step for one matrix, in place on `param` and both buffers; depends on nothing but its arguments.

    param (rows, cols) float32 or bfloat16; grad and momentum_buffer (rows, cols) float32; second_momentum_buffer as in
    `reduce_variance`. `lr` is multiplied by sqrt(max(1, rows / cols)). `live` 0 changes nothing.
    Source: https://kellerjordan.github.io/posts/muon/ and the parts' papers.
    """
    rows, cols = param.shape
    momentum_buffer.add_((grad - momentum_buffer) * ((1 - momentum) * live))
    direction = grad + (momentum_buffer - grad) * momentum  # Nesterov: where the buffer will be after one more step
    update = polar_express(equilibrate_rows(direction).to(polar_dtype), ns_steps).float()
    update = update * (math.sqrt(min(rows, cols)) / update.norm().clamp_min(NORM_FLOOR))
    update = reduce_variance(update, second_momentum_buffer, weight=(1 - beta2) * live)
    p = param.float()
    p = p - (update + cautious_decay(p, update) * weight_decay) * (lr * (max(1.0, rows / cols) ** 0.5) * live)
    param.copy_(p)


def adamw_update(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *, lr: float | Tensor,
                 betas: tuple[float, float], eps: float, weight_decay: float, step: Tensor,
                 live: float | Tensor = 1.0) -> None:
    """One AdamW step, in place on `param` and both averages; depends on nothing but its arguments.

    param: any shape, float32 or bfloat16; the other three the same shape, float32. `step`: 0-dim float32, 1 for the
    first. `live` 0 changes nothing. Source: arXiv 1711.05101, the same formula as torch.optim.AdamW.
    """
    bias1, bias2 = (-torch.expm1(step * math.log(beta)) if beta else torch.ones_like(step) for beta in betas)
    exp_avg.add_((grad - exp_avg) * ((1 - betas[0]) * live))
    exp_avg_sq.add_((grad.square() - exp_avg_sq) * ((1 - betas[1]) * live))
    denominator = (exp_avg_sq / bias2).sqrt() + eps
    rate = lr * live
    param.copy_(param.float() * (1 - rate * weight_decay) - exp_avg / denominator * (rate / bias1))


CPU_BLOCK = 1 << 17  # AdamW's temporaries stay in cache: 10 M elements take 63 ms, 211 ms whole (1 thread)

# ---- the optimizer --------------------------------------------------------------------------------------------------

def get_rank_and_world_size() -> tuple[int, int]:
    """Of the default process group; (0, 1) where there is none."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


NEEDED = {"adamw": ("lr", "betas", "eps", "weight_decay"),
          "muon": ("lr", "momentum", "ns_steps", "beta2", "weight_decay")}


class MuonAdamW(torch.optim.Optimizer):
    """Muon and AdamW over parameter groups, with state and work sharded over the default process group (if any).

    param_groups: dicts with `kind` 'adamw' (lr, betas, eps, weight_decay) or 'muon' (lr, momentum, ns_steps, beta2,
    weight_decay; 2-D parameters only), `params` and, so that the state can be saved, their unique `names` (default
    param_0, param_1, ...). `lr`, `weight_decay` and Muon's `momentum` may be changed at any time; `initial_lr` is the
    lr at construction unless given. Every rank passes the same groups, after the process group exists.

    reduce: how gradients are added over ranks. polar_dtype: what Polar Express computes in (default: bfloat16 on GPUs
    that have it, else float32). compiled: fuse each update with torch.compile (default: on CUDA).
    Raises ValueError for a group that lacks something.
    """

    def __init__(self, param_groups: list[dict[str, Any]], *, reduce: Reduce = tree_reduce,
                 polar_dtype: torch.dtype | None = None, compiled: bool | None = None) -> None:
        super().__init__(param_groups, defaults={})
        self._members = self._name_members()
        self._device = self._members[0].param.device
        self._rank, self._world_size = get_rank_and_world_size()
        self._reduce = reduce
        self._polar_dtype = polar_dtype or get_compute_dtype(self._device)
        compiled = self._device.type == "cuda" if compiled is None else compiled
        self._muon_update = torch.compile(muon_update, dynamic=False) if compiled else muon_update
        self._adamw_update = torch.compile(adamw_update, dynamic=True) if compiled else adamw_update
        self._messages = self._plan()
        self._num_grains, self._my_grains = self._number_grains()
        self._steps = torch.zeros((), device=self._device)  # on the device: a step that is not live does not count
        for piece in self._pieces():
            self.state[piece.member.param] = {key: torch.zeros(shape, device=self._device)
                                              for key, shape in piece.state_shapes().items()}

    def _name_members(self) -> list[Member]:
        """All non-empty parameters in order; checks and completes the groups."""
        members: list[Member] = []
        count = 0
        for index, group in enumerate(self.param_groups):
            kind, params = group.get("kind"), group["params"]
            if kind not in NEEDED:
                raise ValueError(f"parameter group {index}: kind is {kind!r}, expected one of {sorted(NEEDED)}")
            if missing := [key for key in NEEDED[kind] if key not in group]:
                raise ValueError(f"parameter group {index} ({kind}) lacks {', '.join(missing)}")
            group.setdefault("names", [f"param_{count + i}" for i in range(len(params))])
            group.setdefault("initial_lr", group["lr"])
            count += len(params)
            if len(group["names"]) != len(params):
                raise ValueError(f"parameter group {index}: {len(group['names'])} names, {len(params)} params")
            for name, param in zip(group["names"], params):
                if kind == "muon" and param.ndim != 2:
                    raise ValueError(f"{name}: Muon takes matrices, got shape {tuple(param.shape)}; put it in adamw")
                members.append(Member(name, param, kind, index))
        if len({member.name for member in members}) != len(members):
            raise ValueError("parameter names are not unique")
        return [member for member in members if member.param.numel()]

    def _plan(self) -> list[Message]:
        """Matrices first, small tensors last: only the last gather has no update to hide behind."""
        messages: list[Message] = []
        for lay_out, chosen in ((deal_whole, [m for m in self._members if m.kind == "muon"]),
                                (cut_at_grains, [m for m in self._members if not m.whole]),
                                (deal_whole, [m for m in self._members if m.kind == "adamw" and m.whole])):
            for dtype in dict.fromkeys(m.param.dtype for m in chosen):
                messages += lay_out([m for m in chosen if m.param.dtype == dtype], self._world_size)
        return messages

    def _number_grains(self) -> tuple[int, Tensor]:
        """(grains of all parameters, the numbers of this rank's in the order of its pieces)."""
        first, total = {}, 0
        for member in self._members:
            first[member.name] = total
            total += -(-member.param.numel() // member.grain)
        mine = [first[p.member.name] + start // p.member.grain for p in self._pieces()
                for start in range(p.start, p.stop, p.member.grain)]
        return total, torch.tensor(mine, dtype=torch.int64, device=self._device)

    def _pieces(self) -> list[Piece]:
        return [piece for message in self._messages for piece in message.owned[self._rank]]

    # -- a step --

    @torch.no_grad()
    def step(self, grad_scale: float | Tensor = 1.0) -> Tensor:  # type: ignore[override]
        """Add the ranks' gradients, multiply them by `grad_scale`, update all parameters on all ranks.

        Collective. Returns the L2 norm of that gradient over all parameters: 0-dim float32, the same on every rank.
        If it is NaN or inf, no parameter, state or step count has changed. A gradient of None counts as zeros.
        """
        if get_rank_and_world_size() != (self._rank, self._world_size):
            raise RuntimeError("the process group has changed since this optimizer was made")
        reductions = [self._reduce(m.gradients(), self._rank, self._world_size) for m in self._messages]
        chunks = [reductions.pop(0)() for _ in self._messages]  # what has arrived is let go as it is added
        grad_scale = torch.as_tensor(grad_scale, dtype=torch.float32, device=self._device)
        norm = self._norm(chunks) * grad_scale.abs()
        finite = norm.isfinite()
        live = finite.to(torch.float32)
        gathers = []
        for message, chunk in zip(self._messages, chunks):
            grad = (chunk * grad_scale).masked_fill_(~finite, 0.0)
            whole, params = message.parameters(self._rank)
            for piece in message.owned[self._rank]:
                self._update(piece, piece.of(params), piece.of(grad), live)
            gathers.append(message.gather(whole, params))
        for finish in gathers:
            finish()
        self._steps += live
        return norm

    def _norm(self, chunks: list[Tensor]) -> Tensor:
        """The L2 norm over the chunks of all ranks; sums in float64 where the device has it."""
        wide = wide_dtype(self._device)
        norms = [torch.linalg.vector_norm(grain, dtype=wide) for message, chunk in zip(self._messages, chunks)
                 for piece in message.owned[self._rank]
                 for grain in piece.of(chunk).view(-1).split(piece.member.grain)]
        table = torch.zeros(self._num_grains, dtype=wide, device=self._device)
        if norms:
            table[self._my_grains] = torch.stack(norms).square()
        if self._world_size > 1:
            dist.all_reduce(table)
        return table.sum().sqrt().float()

    def _update(self, piece: Piece, param: Tensor, grad: Tensor, live: Tensor) -> None:
        """Update one piece. What a schedule changes goes in as 0-dim tensors, so that nothing is compiled again."""
        group = self.param_groups[piece.member.group]
        state = self.state[piece.member.param]
        scalar = lambda value: torch.full((), value, dtype=torch.float32, device=self._device)
        if piece.member.kind == "muon":
            self._muon_update(param, grad, state["momentum_buffer"], state["second_momentum_buffer"],
                              lr=scalar(group["lr"]), momentum=scalar(group["momentum"]), beta2=group["beta2"],
                              weight_decay=scalar(group["weight_decay"]), ns_steps=group["ns_steps"], live=live,
                              polar_dtype=self._polar_dtype)
        else:
            tensors = [param.view(-1), grad.view(-1), state["exp_avg"], state["exp_avg_sq"]]
            block = CPU_BLOCK if self._device.type == "cpu" else param.numel()
            for parts in zip(*(tensor.split(block) for tensor in tensors)):
                self._adamw_update(*parts, lr=scalar(group["lr"]), betas=group["betas"], eps=group["eps"],
                                   weight_decay=group["weight_decay"], step=self._steps + 1, live=live)

    # -- its state --

    @torch.no_grad()
    def gather_state(self, *, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """Collective. On rank 0 the whole state, on the CPU, with no trace of W; on other ranks {}. `into`: an earlier
        result that nobody reads any more: its tensors are filled and are part of this one.

        {"format": 1, "step": int, "state": {parameter name: {tensor name: float32 tensor}}, "groups": [hyper-parameters
        and names]}. AdamW tensors have their parameter's shape. Holds tensors and plain values only.
        """
        found: dict[str, dict[str, Tensor]] = {} if into is None else into["state"]
        for message in self._messages:
            for key in message.layout[0][0].state_shapes():
                self._gather_tensors(message, key, found)
        if self._rank != 0:
            return {}
        return {"format": 1, "step": int(self._steps), "state": {m.name: found[m.name] for m in self._members},
                "groups": [{key: value for key, value in group.items() if key != "params"}
                           for group in self.param_groups]}

    def _gather_tensors(self, message: Message, key: str, found: dict[str, dict[str, Tensor]]) -> None:
        """Bring the tensors `key` of one message to rank 0, into found[name][key]."""
        sizes = [[math.prod(piece.state_shapes()[key]) for piece in owned] for owned in message.owned]
        mine = [self.state[piece.member.param][key].view(-1) for piece in message.owned[self._rank]]
        longest = max(sum(of_rank) for of_rank in sizes)
        sent = torch.cat([*mine, torch.zeros(longest - sum(sizes[self._rank]), device=self._device)])
        parts = [sent]
        if self._world_size > 1:
            parts = [torch.empty_like(sent) for _ in sizes] if self._rank == 0 else []
            dist.gather(sent, parts or None)
        for part, owned, of_rank in zip(parts, message.owned, sizes):
            for piece, values in zip(owned, part.cpu().split(of_rank + [part.numel() - sum(of_rank)])):
                shape = piece.member.state_shapes()[key]
                whole = found.setdefault(piece.member.name, {}).setdefault(key, torch.empty(shape))
                whole.view(-1)[piece.start:piece.start + values.numel()] = values

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Take what `gather_state` gave, on any W; every rank passes the whole of it. Sets tensors and the step count;
        hyper-parameters stay this run's own. Raises ValueError, before any change, if names or shapes differ."""
        self._check(state)
        for piece in self._pieces():
            for key, mine in self.state[piece.member.param].items():
                whole = state["state"][piece.member.name][key].reshape(-1)
                mine.view(-1).copy_(whole[piece.start:piece.start + mine.numel()])
        self._steps.fill_(state["step"])

    def _check(self, state: dict[str, Any]) -> None:
        """ValueError that lists how `state` differs from what this optimizer would save."""
        if state.get("format") != 1:
            raise ValueError(f"optimizer state: format {state.get('format')!r}, expected 1")
        want = {f"{m.name}.{key}": shape for m in self._members for key, shape in m.state_shapes().items()}
        got = {f"{name}.{key}": tuple(tensor.shape) for name, tensors in state["state"].items()
               for key, tensor in tensors.items()}
        differences = [f"{key}: got {got.get(key, 'nothing')}, expected {want.get(key, 'nothing')}"
                       for key in dict.fromkeys([*want, *got]) if got.get(key) != want.get(key)]
        if differences:
            more = f"; and {len(differences) - 20} more" if len(differences) > 20 else ""
            raise ValueError("optimizer state is not this model's: " + "; ".join(differences[:20]) + more)

    def state_dict(self) -> NoReturn:
        """Refused: it would hold this rank's shard only."""
        raise RuntimeError("MuonAdamW shards its state: use gather_state()")

    def load_state_dict(self, state_dict: Any) -> NoReturn:
        """Refused: see `state_dict`."""
        raise RuntimeError("MuonAdamW shards its state: use load_state()")
