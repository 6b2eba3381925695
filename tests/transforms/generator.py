"""Random small ranking models: random wiring of the operators that real ones are made of, several indices and levels.

A model is a list of steps over a pool of values; each value carries the rate its rows have by construction: users,
vendors (each of a user), queries, or candidates (each of a vendor and of a query). Everything is float64, so that
outputs and gradients can be compared to rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = tuple[Callable[..., Tensor], tuple[int, ...]]

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.relu,
    torch.sigmoid,
    torch.tanh,
    F.gelu,
    F.silu,
    F.leaky_relu,
    torch.square,
    torch.neg,
    lambda x: x * 0.5,
    lambda x: 1.0 - x,
    lambda x: x.clamp(-1.0, 1.0),
    lambda x: F.dropout(x, 0.3, training=False),
    lambda x: x.float().double() * 1.0,
    lambda x: x.clone(),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: F.softmax(x, -1),
    lambda x: F.normalize(x + 2.0, dim=-1),
    lambda x: x.cumsum(-1),
    lambda x: x.flip(-1),
    lambda x: torch.sort(x, dim=-1).values,
    lambda x: F.relu(x * 1.0, inplace=True),
    lambda x: (x * 1.0).add_(1.0),
    lambda x: x - x.mean(-1, keepdim=True),
    lambda x: x.masked_fill(x > 1.0, 0.25),
]

REDUCTIONS: list[Callable[[Tensor, int], Tensor]] = [
    lambda x, d: x.sum(d),
    lambda x, d: x.mean(d),
    lambda x, d: x.amax(d),
    lambda x, d: x.sum(d, keepdim=True),
    lambda x, d: torch.logsumexp(x, d),
    lambda x, d: x.max(d).values,
    lambda x, d: torch.linalg.vector_norm(x + 3.0, dim=d),
    lambda x, d: x.square().sum(d) - x.sum(d).square(),
]

BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.mul,
    torch.sub,
    torch.maximum,
    lambda a, b: torch.where(a > b, a, b * 0.5),
    lambda a, b: a / (b.abs() + 1.0),
    lambda a, b: (a * 1.0).mul_(b) if a.shape == b.shape else a * b,
    lambda a, b: torch.addcmul(a, a, b),
    lambda a, b: torch.lerp(a, b, 0.25),
]


@dataclass
class Sizes:
    """How many users, queries, vendors and candidates."""

    users: int
    candidates: int
    queries: int
    vendors: int


@dataclass
class Case:
    """A model, its inputs, and the seed that made both."""

    seed: int
    model: RandomModel
    inputs: list[Tensor]
    names: list[str]


class RandomModel(nn.Module):
    """Replays recorded steps; the first values of the pool are the inputs."""

    def __init__(self, steps: list[Step], outputs: list[int], params: list[Tensor]) -> None:
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.params = nn.ParameterList([nn.Parameter(p) for p in params])

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return replay(self.steps, self.outputs, list(inputs), list(self.params))


def replay(steps: list[Step], outputs: list[int], inputs: list[Tensor], params: list[Tensor]) -> tuple[Tensor, ...]:
    pool = list(inputs)
    for function, operands in steps:
        pool.append(function(params, *(pool[i] for i in operands)))
    return tuple(pool[i] for i in outputs)


@dataclass
class Generator:
    """Makes one model. `rate[i]` is what the rows of value i are: "u", "q", "v", "b", or None for indices."""

    seed: int
    sizes: Sizes
    pool: list[Tensor] = field(default_factory=list)
    rate: list[str | None] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.torch_rng = torch.Generator().manual_seed(self.seed)

    def generate(self) -> Case:
        inputs, names = self._inputs()
        for _ in range(self.rng.randint(2, 5)):
            self._try(self._prepare)
        for _ in range(self.rng.randint(4, 12)):
            self._try(self._step)
        outputs = self._outputs(len(inputs))
        return Case(self.seed, RandomModel(self.steps, outputs, self.params), inputs, names)

    # ---- pieces ----------------------------------------------------------------------------------------------------

    def _inputs(self) -> tuple[list[Tensor], list[str]]:
        s, rng = self.sizes, self.torch_rng

        def rows(count: int, *shape: int) -> Tensor:
            return torch.randn((count, *shape), generator=rng, dtype=torch.float64)

        def indices(count: int, below: int) -> Tensor:
            return torch.randint(0, below, (count,), generator=rng).to(self.rng.choice((torch.int32, torch.int64)))

        given = {
            "user": ("u", rows(s.users, 4)),
            "history": ("u", rows(s.users, 3, 4)),
            "user_id": (None, torch.randint(0, 5, (s.users,), generator=rng)),
            "query": ("q", rows(s.queries, 4)),
            "vendor": ("v", rows(s.vendors, 4)),
            "item": ("b", rows(s.candidates, 4)),
            "items": ("b", rows(s.candidates, 2, 4)),
            "item_to_user": (None, indices(s.candidates, s.users)),
            "item_to_query": (None, indices(s.candidates, s.queries)),
            "vendor_to_user": (None, indices(s.vendors, s.users)),
            "item_to_vendor": (None, indices(s.candidates, s.vendors)),
        }
        for rate, tensor in given.values():
            self.pool.append(tensor)
            self.rate.append(rate)
        self.index = {name: i for i, name in enumerate(given)}
        return [t for _, t in given.values()], list(given)

    def _record(self, function: Callable[..., Tensor], *operands: int, rate: str | None) -> None:
        result = function(self.params, *(self.pool[i] for i in operands))
        if not torch.isfinite(result).all() or result.numel() > 4000:
            return
        self.steps.append((function, operands))
        self.pool.append(result)
        self.rate.append(rate)

    def _try(self, make: Callable[[], None]) -> None:
        count = len(self.params)
        try:
            make()
        except (RuntimeError, IndexError, ValueError):  # shapes that do not fit: no step
            del self.params[count:]

    def _pick(self, rate: str | None = None, rank: int | None = None) -> int:
        choices = [
            i
            for i, r in enumerate(self.rate)
            if r is not None and (rate is None or r == rate) and (rank is None or self.pool[i].dim() == rank)
        ]
        late = choices[-6:] if self.rng.random() < 0.7 else choices
        return self.rng.choice(late)

    def _param(self, *shape: int) -> int:
        self.params.append(torch.randn(shape, generator=self.torch_rng, dtype=torch.float64) * 0.5)
        return len(self.params) - 1

    def _outputs(self, inputs: int) -> list[int]:
        made = [i for i in range(inputs, len(self.pool)) if self.rate[i] is not None]
        last = made[-1:] or [0]
        return list(dict.fromkeys([*last, *self.rng.sample(made, min(len(made), 2))]))

    # ---- steps -----------------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Towers at the user's rate, and broadcasts."""
        if self.rng.random() < 0.4:
            return self._one(self._pick(self.rng.choice("uqv")))
        return self._broadcast()

    def _step(self) -> None:
        kinds = [
            self._unary,
            self._linear,
            self._cat,
            self._binary,
            self._reshape,
            self._reduce,
            self._matmul,
            self._attend,
        ]
        weights = [3, 4, 5, 4, 4, 2, 3, 2]
        kinds += [self._broadcast, self._embed, self._split, self._stretch]
        weights += [2, 1, 2, 2]
        return self.rng.choices(kinds, weights)[0]()

    def _one(self, i: int) -> None:
        if self.rng.random() < 0.5:
            self._apply_linear(i)
        else:
            function = self.rng.choice(UNARY)
            self._record(lambda p, x: function(x), i, rate=self.rate[i])

    def _unary(self) -> None:
        i = self._pick()
        function = self.rng.choice(UNARY)
        self._record(lambda p, x: function(x), i, rate=self.rate[i])

    def _linear(self) -> None:
        self._apply_linear(self._pick())

    def _apply_linear(self, i: int) -> None:
        width, out = self.pool[i].shape[-1], self.rng.choice((1, 2, 4))
        w, b = self._param(out, width), self._param(out)
        biased = self.rng.random() < 0.6
        if self.rng.random() < 0.25:
            self._record(lambda p, x: x @ p[w].t(), i, rate=self.rate[i])
        else:
            self._record(lambda p, x: F.linear(x, p[w], p[b] if biased else None), i, rate=self.rate[i])

    def _broadcast(self) -> None:
        source, target, name = self.rng.choice(
            (
                ("u", "b", "item_to_user"),
                ("u", "b", "item_to_user"),
                ("q", "b", "item_to_query"),
                ("u", "v", "vendor_to_user"),
                ("v", "b", "item_to_vendor"),
                ("v", "b", "item_to_vendor"),
            )
        )
        i, index = self._pick(source), self.index[name]
        spellings = [
            lambda p, x, n: x.index_select(0, n),
            lambda p, x, n: x[n.long()],
            lambda p, x, n: x[n.to(torch.int64)],
            lambda p, x, n: torch.gather(x, 0, n.long().reshape(-1, *[1] * (x.dim() - 1)).expand(-1, *x.shape[1:])),
            lambda p, x, n: F.embedding(n, x) if x.dim() == 2 else x[n],
        ]
        self._record(self.rng.choice(spellings), i, index, rate=target)

    def _embed(self) -> None:
        table = self._param(5, self.rng.choice((2, 4)))
        rows = self.rng.random() < 0.5
        index = self.index["item_to_user"]
        if rows:
            self._record(lambda p, ids, n: F.embedding(ids[n.long()], p[table]), self.index["user_id"], index, rate="b")
        else:
            self._record(lambda p, ids: F.embedding(ids, p[table]), self.index["user_id"], rate="u")

    def _cat(self) -> None:
        first = self._pick()
        rank, rate = self.pool[first].dim(), self.rate[first]
        others = [self._pick(rate, rank) for _ in range(self.rng.randint(1, 3))]
        axis = self.rng.choice(range(1, rank)) if rank > 1 else 0
        stack = self.rng.random() < 0.2
        if rank == 1 or stack:
            self._record(lambda p, *xs: torch.stack(xs, -1), first, *others, rate=rate)
        else:
            self._record(lambda p, *xs: torch.cat(xs, axis), first, *others, rate=rate)

    def _binary(self) -> None:
        a = self._pick()
        b = self._pick(self.rate[a])
        function = self.rng.choice(BINARY)
        if self.pool[b].dim() < self.pool[a].dim() and self.rng.random() < 0.6:
            self._record(lambda p, x, y: function(x, y.unsqueeze(1)), a, b, rate=self.rate[a])
        elif self.rng.random() < 0.2:
            w = self._param(self.pool[a].shape[-1])
            self._record(lambda p, x: function(x, p[w]), a, rate=self.rate[a])
        elif self.pool[a].dim() == self.pool[b].dim():
            self._record(lambda p, x, y: function(x, y), a, b, rate=self.rate[a])

    def _reshape(self) -> None:
        i = self._pick()
        x, rate = self.pool[i], self.rate[i]
        if x.dim() == 3:
            width = x.shape[2]
            choices: list[Callable[..., Tensor]] = [
                lambda p, x: x.flatten(1),
                lambda p, x: x.transpose(1, 2),
                lambda p, x: torch.tanh(x.reshape(-1, width)).view(x.shape),
                lambda p, x: x[:, -1],
                lambda p, x: x.permute(0, 2, 1).contiguous().view(x.shape[0], -1),
                lambda p, x: torch.cat([x, x.new_zeros(x.shape[0], 1, width)], 1),
            ]
        else:
            width = x.shape[-1]
            choices = [
                lambda p, x: x.unsqueeze(1),
                lambda p, x: x.reshape(x.shape[0], width // 2, 2),
                lambda p, x: x.view(-1, 2, width // 2),
                lambda p, x: x[:, : width // 2 + 1],
                lambda p, x: x[:, 0],
                lambda p, x: x[:, torch.arange(0, width, 2)],
                lambda p, x: x.new_ones(x.shape[0], 1) * x,
            ]
        self._record(self.rng.choice(choices), i, rate=rate)

    def _stretch(self) -> None:
        """Target attention's input: a vector beside each row of a sequence, in one long batch."""
        sequence = self._pick(rank=3)
        rate = self.rate[sequence]
        vector = self._pick(rate, 2)
        out = self._param(2, self.pool[sequence].shape[2] + self.pool[vector].shape[1])

        def target(p: list[Tensor], s: Tensor, v: Tensor) -> Tensor:
            pair = torch.cat([v.unsqueeze(1).expand(-1, s.shape[1], -1), s], -1)
            return F.linear(pair.reshape(-1, pair.shape[2]), p[out]).view(s.shape[0], s.shape[1], 2)

        self._record(target, sequence, vector, rate=rate)

    def _reduce(self) -> None:
        i = self._pick()
        axis = self.rng.choice(range(1, self.pool[i].dim()))
        function = self.rng.choice(REDUCTIONS)
        if self.pool[i].dim() == 3 or self.rng.random() < 0.3:
            self._record(lambda p, x: function(x, axis), i, rate=self.rate[i])

    def _split(self) -> None:
        i = self._pick()
        axis = self.rng.choice(range(1, self.pool[i].dim()))
        parts, chosen = self.rng.choice((1, 2, 3)), self.rng.choice((0, -1))
        if self.rng.random() < 0.3:
            self._record(lambda p, x: x.unbind(axis)[chosen], i, rate=self.rate[i])
        else:
            self._record(lambda p, x: x.split(parts, axis)[chosen], i, rate=self.rate[i])

    def _matmul(self) -> None:
        i = self._pick(rank=3)
        x, rate = self.pool[i], self.rate[i]
        kind = self.rng.randrange(5)
        if kind == 0:
            w = self._param(2, x.shape[1])
            self._record(lambda p, x: p[w] @ x, i, rate=rate)
        elif kind == 1:
            f, lower = x.shape[1], self.rng.random() < 0.3

            def dots(p: list[Tensor], x: Tensor) -> Tensor:
                first, second = torch.tril_indices(f, f, -1) if lower else torch.triu_indices(f, f, 1)
                return torch.bmm(x, x.transpose(1, 2))[:, first, second]

            self._record(dots, i, rate=rate)
        elif kind == 2:
            w = self._param(2, x.shape[1])
            self._record(lambda p, x: torch.einsum("mk,bkd->bmd", p[w], x), i, rate=rate)
        else:
            j = self._pick(rate, 3)
            if kind == 3:
                self._record(lambda p, x, y: torch.matmul(x, y.mT), i, j, rate=rate)
            else:
                self._record(lambda p, x, y: torch.einsum("bid,bjd->bij", x, y), i, j, rate=rate)

    def _attend(self) -> None:
        q = self._pick(rank=3)
        rate = self.rate[q]
        k = self._pick(rate, 3)
        heads = self.rng.choice((1, 2))

        def attend(p: list[Tensor], q: Tensor, k: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, torch.tanh(k)))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        self._record(attend, q, k, rate=rate)


def generate(seed: int, sizes: Sizes) -> Case:
    """The model of a seed."""
    return Generator(seed, sizes).generate()
