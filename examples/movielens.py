"""MovieLens-100K as ranking requests: what the numbered examples share.

A request is what one user rated at one moment: the user's features and history as of then, and all the candidates of
that moment with a label, whether the rating was 4 or 5. The data is fetched when it is first needed and never stored
elsewhere than in `.data/`; `IKBO_DATA` names a local copy: the `ml-100k` folder of RecBole, or its wheel.
"""

import io
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from broadcast_twin import BroadcastTwin
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ikbo_recsys import CandidateIndex
from ikbo_recsys.models import IKBOSequenceRanker

ROOT = Path(__file__).resolve().parent.parent
CACHE, OUT = ROOT / ".data", Path(os.environ.get("IKBO_OUT", ROOT / "out" / "demo"))
PACKAGE = "recbole==1.2.1"
TERMS = """\
MovieLens-100K: F. Maxwell Harper and Joseph A. Konstan, "The MovieLens Datasets", ACM TiiS 5(4), 2015. The terms of
GroupLens: for research; acknowledge it in publications; do not redistribute it; no commercial use without permission.
It is fetched into .data/ now."""

USER_TABLES = {"age": 7, "gender": 2, "occupation": 21}
CANDIDATE_TABLES = {"genres": 19, "year": 80, "rate": 50, "ratings": 10}
FIRST_YEAR = 1920
DENSE_FEATURES = 2 + CANDIDATE_TABLES["genres"]
EMBEDDING_DIM, MAX_HISTORY = 16, 50


class Batch(NamedTuple):
    """U requests with B candidates in all."""

    dense: Tensor
    user: KeyedJaggedTensor
    candidate: KeyedJaggedTensor
    index: CandidateIndex
    label: Tensor


# ---- the files -------------------------------------------------------------------------------------------------------


def find_data() -> Path:
    """The `ml-100k` folder or the wheel that has it, downloaded with pip if need be."""
    if "IKBO_DATA" in os.environ:
        return Path(os.environ["IKBO_DATA"])
    if not list(CACHE.glob("recbole-*.whl")):
        print(TERMS)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(CACHE), PACKAGE]
        subprocess.run(command, check=True)
    return next(CACHE.glob("recbole-*.whl"))


def read_table(source: Path, name: str) -> pd.DataFrame:
    """One of RecBole's atomic files, `ml-100k.<name>`, with the types dropped from its column names."""
    if source.is_dir():
        content = (source / f"ml-100k.{name}").read_bytes()
    else:
        with zipfile.ZipFile(source) as wheel:
            content = wheel.read(f"recbole/dataset_example/ml-100k/ml-100k.{name}")
    table = pd.read_csv(io.BytesIO(content), sep="\t", encoding="utf-8")
    return table.rename(columns=lambda column: column.split(":")[0])


# ---- requests --------------------------------------------------------------------------------------------------------


@dataclass
class MovieLens:
    """Requests in the order of time; `offsets` says where the candidates of each are in `item` and `label`."""

    user: np.ndarray  # [R] the user of each request
    dense: np.ndarray  # [R, 21] log of the number of ratings before; how much better than others do the user liked
    #                            these items, over all and for each genre
    positives_before: np.ndarray  # [R] how many of the user's positive items came before the request
    offsets: np.ndarray  # [R + 1]
    item: np.ndarray
    label: np.ndarray
    rate: np.ndarray  # for each of `item`, the share of its ratings before the request that were positive
    ratings: np.ndarray  # and how many these were
    positives: list[np.ndarray]  # for each user, the items rated 4 or 5, in the order of time
    user_features: dict[str, np.ndarray]
    genres: list[np.ndarray]
    year: np.ndarray
    titles: list[str]
    rate_at_end: np.ndarray  # for each item, `rate` and `ratings` after all requests
    ratings_at_end: np.ndarray

    def split(self, share: float) -> tuple[np.ndarray, np.ndarray]:
        """The requests that have the first `share` of the candidates, and the later ones."""
        cut = int(np.searchsorted(self.offsets, share * len(self.item)))
        return np.arange(cut), np.arange(cut, len(self.user))

    def candidates(self, requests: np.ndarray) -> np.ndarray:
        """Positions in `item` and `label` of the candidates of requests."""
        return np.concatenate([np.arange(self.offsets[r], self.offsets[r + 1]) for r in requests])

    def batch(self, requests: np.ndarray) -> Batch:
        """Some requests, as the model takes them."""
        rows = self.candidates(requests)
        counts = np.diff(self.offsets)[requests]
        user = self.user_batch(requests)
        index = CandidateIndex.from_counts(torch.from_numpy(counts))
        candidate = self.candidate_batch(self.item[rows], self.rate[rows], self.ratings[rows])
        return Batch(*user, candidate, index, torch.from_numpy(self.label[rows]))

    def user_batch(self, requests: np.ndarray) -> tuple[Tensor, KeyedJaggedTensor]:
        histories = [
            self.positives[user][max(0, before - MAX_HISTORY) : before][::-1]
            for user, before in zip(self.user[requests], self.positives_before[requests], strict=True)
        ]
        columns = {name: list(self.user_features[name][self.user[requests]][:, None]) for name in USER_TABLES}
        return torch.from_numpy(self.dense[requests]), to_kjt(columns | {"history": histories})

    def candidate_batch(self, items: np.ndarray, rate: np.ndarray, ratings: np.ndarray) -> KeyedJaggedTensor:
        """Some items, and how popular they are by then: bags of all thresholds passed, so close values are alike."""
        columns = {
            "genres": [self.genres[i] for i in items],
            "year": list(self.year[items][:, None]),
            "rate": [np.arange(n) for n in (rate * CANDIDATE_TABLES["rate"]).astype(np.int64)],
            "ratings": [np.arange(n) for n in np.log2(ratings + 1).astype(np.int64)],
        }
        return to_kjt(columns | {"item": list(items[:, None])})


def shuffled(requests: np.ndarray, size: int, seed: int) -> list[np.ndarray]:
    """Batches of `size` requests each, in random order."""
    order = np.random.default_rng(seed).permutation(requests)
    return [order[start : start + size] for start in range(0, len(order), size)]


def smoothed(positives, ratings):
    """The share of positives; who has no ratings yet is taken for having ten average ones, which fade out."""
    return (positives + 5.5) / (ratings + 10)


def to_kjt(columns: dict[str, list[np.ndarray]]) -> KeyedJaggedTensor:
    """Ids of each feature, row by row."""
    rows = [row for column in columns.values() for row in column]
    lengths = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    values = torch.from_numpy(np.concatenate(rows).astype(np.int64)) if rows else torch.zeros(0, dtype=torch.int64)
    return KeyedJaggedTensor(list(columns), values, lengths=lengths)


def load() -> MovieLens:
    source = find_data()
    ratings, users, items = (read_table(source, name) for name in ("inter", "user", "item"))
    users, items = users.sort_values("user_id"), items.sort_values("item_id")
    ratings = ratings.sort_values(["timestamp", "user_id", "item_id"], kind="stable")
    user, item = ratings.user_id.to_numpy() - 1, ratings.item_id.to_numpy() - 1
    label = (ratings.rating.to_numpy() >= 4).astype(np.float32)
    time = ratings.timestamp.to_numpy()

    starts = np.flatnonzero(np.r_[True, (user[1:] != user[:-1]) | (time[1:] != time[:-1])])
    offsets = np.r_[starts, len(user)]
    age = users.age.to_numpy()
    genre_names = sorted({genre for genres in items["class"] for genre in str(genres).split()})
    genres = [np.array([genre_names.index(genre) for genre in str(row).split()]) for row in items["class"]]
    kinds = np.zeros((len(items), 1 + len(genre_names)))
    kinds[:, 0] = 1
    for row, of_item in zip(kinds, genres, strict=True):
        row[1 + of_item] = 1
    dense = np.zeros((len(starts), DENSE_FEATURES), np.float32)
    before = np.zeros(len(starts), np.int64)
    positives: list[list[int]] = [[] for _ in range(len(users))]
    rate, ratings_before = np.zeros(len(item)), np.zeros(len(item))
    item_positives, item_ratings = np.zeros(len(items)), np.zeros(len(items))
    excess, rated = np.zeros((len(users), kinds.shape[1])), np.zeros((len(users), kinds.shape[1]))
    for request, (start, stop) in enumerate(pairwise(offsets)):
        who, shown, liked = user[start], item[start:stop], label[start:stop]
        before[request] = len(positives[who])
        dense[request] = np.log1p(rated[who, 0]) / 5, *(5 * excess[who] / (rated[who] + 10))
        rate[start:stop] = smoothed(item_positives[shown], item_ratings[shown])
        ratings_before[start:stop] = item_ratings[shown]
        positives[who] += shown[liked > 0].tolist()
        excess[who] += (liked - rate[start:stop]) @ kinds[shown]
        rated[who] += kinds[shown].sum(0)
        item_positives[shown] += liked
        item_ratings[shown] += 1

    year = pd.to_numeric(items.release_year, errors="coerce").fillna(FIRST_YEAR).to_numpy(np.int64) - FIRST_YEAR
    return MovieLens(
        user[starts],
        dense,
        before,
        offsets,
        item,
        label,
        rate,
        ratings_before,
        [np.array(history, np.int64) for history in positives],
        {
            "age": np.digitize(age, [18, 25, 35, 45, 50, 56]),
            "gender": (users.gender == "F").to_numpy(np.int64),
            "occupation": users.occupation.astype("category").cat.codes.to_numpy(np.int64),
        },
        genres,
        year.clip(0, CANDIDATE_TABLES["year"] - 1),
        items.movie_title.tolist(),
        smoothed(item_positives, item_ratings),
        item_ratings,
    )


# ---- the model -------------------------------------------------------------------------------------------------------


def small_normal(weight: Tensor) -> Tensor:
    """The default would be as wide as 0.7 for a table of 2 rows: noise that little data does not unlearn."""
    return torch.nn.init.normal_(weight, std=0.01)


def bags(tables: dict[str, int], embedding_dim: int) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            name=name,
            embedding_dim=embedding_dim,
            num_embeddings=rows,
            feature_names=[name],
            init_fn=small_normal,
        )
        for name, rows in tables.items()
    ]
    return EmbeddingBagCollection(tables=configs)


def make_model(num_items: int) -> IKBOSequenceRanker:
    items = EmbeddingConfig(
        name="item",
        embedding_dim=EMBEDDING_DIM,
        num_embeddings=num_items,
        feature_names=["history", "item"],
        init_fn=small_normal,
    )
    return IKBOSequenceRanker(
        bags(USER_TABLES, EMBEDDING_DIM),
        bags(CANDIDATE_TABLES, EMBEDDING_DIM),
        EmbeddingCollection(tables=[items]),
        dense_in_features=DENSE_FEATURES,
        max_history=MAX_HISTORY,
    )


def make_twin(model: IKBOSequenceRanker) -> BroadcastTwin:
    """The dense part that copies users, with the weights of `model.dense`."""
    twin = BroadcastTwin(DENSE_FEATURES, model.sparse.user_features, model.sparse.candidate_features, EMBEDDING_DIM)
    twin.load_state_dict(model.dense.state_dict())
    return twin.train(model.training)


# ---- what the demo says ----------------------------------------------------------------------------------------------


def save_report(**values: object) -> None:
    """Add values to `out/demo/report.json`."""
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "report.json"
    report = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(report | values, indent=2) + "\n")
