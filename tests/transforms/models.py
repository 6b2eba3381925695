"""Models that nobody here wrote, as their packages ship them: torchrec, torch-rechub, deepctr-torch.

Each case gives the model, the inputs of a batch with U users and B candidates, and how the model is to be
optimized. With `caller=True` the model takes B rows of everything, and its optimized form takes the user's inputs
at U rows and the index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

DIM, HISTORY, ROWS = 8, 6, 20
USER_KEYS = [f"u{i}" for i in range(6)]
ITEM_KEYS = [f"c{i}" for i in range(3)]
PAIRS = ((3, 7), (1, 1), (1, 50), (9, 2))


@dataclass
class ModelCase:
    """One model.

    Attributes:
        build: makes the model.
        inputs: `(U, B, generator)` to the arguments of the optimized program: `(args, index)`.
        users: names of the user's inputs, in mode (b).
        skip: pairs (U, B) that the model itself cannot run (it squeezes a batch of one).
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, int, torch.Generator], tuple[tuple[Any, ...], Tensor]]
    caller: bool = False
    users: list[str] = field(default_factory=list)
    dynamic: dict[str, Any] | None = None
    trains: bool = True
    skip: tuple[tuple[int, int], ...] = ()

    def make(self) -> nn.Module:
        """The model in evaluation mode, with statistics and embeddings that are not the initial, nearly equal ones."""
        torch.manual_seed(0)
        model = self.build()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.running_mean.normal_()  # type: ignore[union-attr]
                module.running_var.uniform_(0.5, 2.0)  # type: ignore[union-attr]
            if isinstance(module, nn.Embedding | nn.EmbeddingBag):
                nn.init.normal_(module.weight, std=0.5)
        return model.eval()

    def batch(
        self, users: int, candidates: int, seed: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
        """(args, kwargs) of the optimized program, and the args of the model as it is."""
        args, index = self.inputs(users, candidates, torch.Generator().manual_seed(seed))
        if not self.caller:
            return args, {}, args
        named = {name.split(".", 1)[1] for name in self.users}
        full = {k: v.index_select(0, index) if k in named else v for k, v in args[0].items()}
        return args, {"to_user": index}, (full,)

    def options(self) -> dict[str, Any]:
        return {"user_inputs": self.users} if self.caller else {"dynamic": self.dynamic}


# ---- torchrec ------------------------------------------------------------------------------------------------------


def _torchrec(name: str, build: Callable[[Any], nn.Module]) -> ModelCase:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

    def configs(keys: list[str]) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(name=f"t_{k}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[k]) for k in keys
        ]

    class TwoSided(nn.Module):
        """What torchrec's models take as their embedding collection: here user ids at U and candidate ids at B."""

        def __init__(self) -> None:
            super().__init__()
            self.user = EmbeddingBagCollection(tables=configs(USER_KEYS))
            self.item = EmbeddingBagCollection(tables=configs(ITEM_KEYS))

        def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
            return configs(USER_KEYS + ITEM_KEYS)

        def forward(self, features: Any) -> KeyedTensor:
            user, item, index = features
            values = torch.cat([self.user(user).values()[index], self.item(item).values()], 1)
            keys = USER_KEYS + ITEM_KEYS
            return KeyedTensor(keys=keys, length_per_key=[DIM] * len(keys), values=values)

    class Serving(nn.Module):
        """Tensors in: jagged features are made of lengths inside the program."""

        def __init__(self) -> None:
            super().__init__()
            self.model = build(TwoSided())

        def forward(
            self, dense: Tensor, user_ids: Tensor, user_lengths: Tensor, ids: Tensor, lengths: Tensor, index: Tensor
        ):
            user = KeyedJaggedTensor(USER_KEYS, user_ids, lengths=user_lengths.reshape(-1))
            item = KeyedJaggedTensor(ITEM_KEYS, ids, lengths=lengths.reshape(-1))
            return self.model(dense, (user, item, index))

    def inputs(users: int, candidates: int, g: torch.Generator) -> tuple[tuple[Any, ...], Tensor]:
        user_lengths = torch.randint(1, 4, (len(USER_KEYS), users), generator=g)
        lengths = torch.randint(1, 3, (len(ITEM_KEYS), candidates), generator=g)
        if users > 1:  # somebody without any id
            user_lengths[:, 0] = lengths[:, 0] = 0
        index = torch.randint(0, users, (candidates,), generator=g)
        user_ids, ids = (torch.randint(0, ROWS, (int(n.sum()),), generator=g) for n in (user_lengths, lengths))
        return (torch.randn(candidates, 5, generator=g), user_ids, user_lengths, ids, lengths, index), index

    dynamic = {"dense": "B", "user_ids": "NU", "user_lengths": {1: "U"}, "ids": "NC", "lengths": {1: "B"}, "index": "B"}
    return ModelCase(f"torchrec {name}", Serving, inputs, dynamic=dynamic)


def torchrec_cases() -> list[ModelCase]:
    from torchrec.models import dlrm
    from torchrec.models.deepfm import SimpleDeepFMNN

    over = [4 * DIM, 2 * DIM, 1]
    return [
        _torchrec("DLRM", lambda ebc: dlrm.DLRM(ebc, 5, [2 * DIM, DIM], over)),
        _torchrec("DLRM_DCN", lambda ebc: dlrm.DLRM_DCN(ebc, 5, [2 * DIM, DIM], over, 2, 8)),
        _torchrec(
            "DLRM_Projection", lambda e: dlrm.DLRM_Projection(e, 5, [2 * DIM, DIM], over, [4 * DIM] * 2, [4 * DIM] * 2)
        ),
        _torchrec("SimpleDeepFMNN", lambda ebc: SimpleDeepFMNN(5, ebc, 2 * DIM, DIM)),
    ]


# ---- torch-rechub: one dictionary of B rows ------------------------------------------------------------------------


def rechub_cases() -> list[ModelCase]:
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature
    from torch_rechub.models import ranking

    user = [SparseFeature(k, ROWS, DIM) for k in USER_KEYS]
    item = [SparseFeature(k, ROWS, DIM) for k in ITEM_KEYS]
    dense = [DenseFeature("u_dense")]
    history = [SequenceFeature("u_history", ROWS, DIM, pooling="concat", shared_with="c0")]
    tower = {"dims": [4 * DIM, 2 * DIM], "dropout": 0.0, "activation": "relu"}

    def case(name: str, build: Callable[[], nn.Module], features: list[Any], **options: Any) -> ModelCase:
        def inputs(users: int, candidates: int, g: torch.Generator) -> tuple[tuple[Any, ...], Tensor]:
            x = {}
            for feature in features:
                rows = users if feature.name.startswith("u") else candidates
                if isinstance(feature, DenseFeature):
                    x[feature.name] = torch.randn(rows, generator=g)
                else:
                    shape = (rows, HISTORY) if isinstance(feature, SequenceFeature) else (rows,)
                    x[feature.name] = torch.randint(0, ROWS, shape, generator=g)
            return (x,), torch.randint(0, users, (candidates,), generator=g)

        users = [f"x.{f.name}" for f in features if f.name.startswith("u")]
        return ModelCase(f"torch-rechub {name}", build, inputs, caller=True, users=users, **options)

    both = user + item
    sequence = user + history + item[:1]
    ones = ((1, 1),)
    r = ranking
    return [
        case(
            "DIN", lambda: r.DIN(user, history, item[:1], {"dims": [4 * DIM, 2 * DIM]}, {"dims": [2 * DIM]}), sequence
        ),
        case("DCN", lambda: r.DCN(both, 3, dict(tower)), both),
        case("DCNv2", lambda: r.DCNv2(both, 3, dict(tower), use_low_rank_mixture=False), both),
        case("DCNv2 mixture", lambda: r.DCNv2(both, 2, dict(tower)), both, skip=ones),
        case("DeepFM", lambda: r.DeepFM(both, both, dict(tower)), both),
        case("WideDeep", lambda: r.WideDeep(dense + user, both, dict(tower)), dense + both),
        case("BST", lambda: r.BST(user, history, item[:1], dict(tower), nhead=2, dropout=0.0, max_seq_len=7), sequence),
        case("AFM", lambda: r.AFM(both, DIM), both),
        case("AutoInt", lambda: r.AutoInt(both, [], mlp_params=dict(tower)), both),
        case("FiBiNet", lambda: r.FiBiNet(both, dict(tower)), both),
        case("EDCN", lambda: r.EDCN(both, 2, {"dropout": 0.0}), both),
    ]


# ---- deepctr-torch: one matrix with a column for each feature ------------------------------------------------------


class Concatenating(nn.Module):
    """Feeds a model that takes all features as one matrix: the user's columns are looked up per candidate."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, user: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        return self.model(torch.cat([user[index], candidate], 1))


def deepctr_cases() -> list[ModelCase]:
    import deepctr_torch.models as deepctr
    from deepctr_torch.inputs import DenseFeat, SparseFeat

    user = [*(SparseFeat(k, ROWS, DIM) for k in USER_KEYS[:5]), DenseFeat("u_dense", 2)]
    item = [*(SparseFeat(k, ROWS, DIM) for k in ITEM_KEYS), DenseFeat("c_dense", 1)]
    columns = user + item
    sparse = [c for c in columns if isinstance(c, SparseFeat)]
    net = {"dnn_hidden_units": (4 * DIM, 2 * DIM), "init_std": 0.1}

    def case(name: str, build: Callable[[], nn.Module], **options: Any) -> ModelCase:
        def inputs(users: int, candidates: int, g: torch.Generator) -> tuple[tuple[Any, ...], Tensor]:
            def rows(count: int, ids: int, numbers: int) -> Tensor:
                integers = torch.randint(0, ROWS, (count, ids), generator=g).float()
                return torch.cat([integers, torch.randn(count, numbers, generator=g)], 1)

            index = torch.randint(0, users, (candidates,), generator=g)
            return (rows(users, 5, 2), rows(candidates, len(ITEM_KEYS), 1), index), index

        return ModelCase(f"deepctr-torch {name}", lambda: Concatenating(build()), inputs, **options)

    names = ("DeepFM", "xDeepFM", "DCN", "AutoInt", "NFM", "FiBiNET", "WDL", "IFM", "DIFM", "ONN")
    cases = [case(name, lambda name=name: getattr(deepctr, name)(columns, columns, **net)) for name in names]
    cases.append(case("DCNMix", lambda: deepctr.DCNMix(columns, columns, **net), skip=((1, 1),)))
    cases.append(case("PNN", lambda: deepctr.PNN(columns, **net)))
    cases.append(case("AFM", lambda: deepctr.AFM(columns, sparse, init_std=0.1)))
    return cases
