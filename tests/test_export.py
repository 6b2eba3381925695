"""Exported and packaged programs: both batch sizes dynamic and apart, and no need for this library where they run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ikbo_recsys import CandidateIndex, IKBOCompressionLinear, IKBOCrossAttention, IKBOInteraction, IKBOLinear
from ikbo_recsys.export import check_program, export, package
from tests.inductor import Passed, stopped_before_code

SIZES = [(1, 1), (1, 50), (3, 7), (7, 7), (9, 2)]
DYNAMIC = {"user": "U", "history": {0: "U", 1: "T"}, "lengths": "U", "candidate": "B", "index": "B"}


class AllOperators(nn.Module):
    """Every operator, chained, on slices of its inputs and of other results."""

    def __init__(self) -> None:
        super().__init__()
        self.compress = IKBOCompressionLinear(5, 3, 4)
        self.attend = IKBOCrossAttention(16, 2)
        self.interact = IKBOInteraction()
        self.over = IKBOLinear(5 * 16, 4 * 16 + 16 + 36, 2, activation="gelu")

    def forward(
        self, user: Tensor, history: Tensor, lengths: Tensor, candidate: Tensor, index: CandidateIndex
    ) -> Tensor:
        compressed = self.compress(user, candidate, index)
        taste = self.attend(history, compressed[:, 1:2], index, lengths)
        pairs = self.interact(user, torch.cat((candidate, taste), 1), index)
        mixed = torch.cat((compressed.flatten(1), taste.flatten(1), pairs), 1)
        return self.over(user.flatten(1), mixed, index)


def make_inputs(users: int, candidates: int, history: int = 10, grouped: bool = False) -> list:
    """The last user but one has no history, and the last one no candidates, where there are so many."""
    to_user = torch.randint(0, max(users - 1, 1), (candidates,))
    lengths = torch.randint(min(1, history), history + 1, (users,))
    lengths[-2:-1] = 0
    index = CandidateIndex.from_user_ids(to_user.sort().values if grouped else to_user, users, grouped=grouped)
    return [torch.randn(users, 5, 16), torch.randn(users, history, 16), lengths, torch.randn(candidates, 3, 16), index]


def as_tensors(inputs: list) -> list[Tensor]:
    return [x.to_user if isinstance(x, CandidateIndex) else x for x in inputs]


def assert_serves(run, model: nn.Module, sizes=SIZES, **kwargs) -> None:
    for users, candidates in sizes:
        inputs = make_inputs(users, candidates, **kwargs)
        scores = run(*as_tensors(inputs))
        assert scores.shape[0] == candidates
        torch.testing.assert_close(scores, model(*inputs), msg=lambda m, s=(users, candidates): f"(U, B) = {s}: {m}")


@pytest.fixture(scope="module")
def model() -> AllOperators:
    torch.manual_seed(0)
    return AllOperators().eval().requires_grad_(False)


@pytest.fixture(scope="module")
def packaged(model: AllOperators, tmp_path_factory: pytest.TempPathFactory) -> str:
    program = export(model, tuple(make_inputs(1, 1)), dynamic=DYNAMIC)
    return package(program, tmp_path_factory.mktemp("package") / "model.pt2")


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("example", [(3, 7), (1, 7), (2, 1), (7, 2), (2, 0)])
def test_sizes_are_found_and_stay_dynamic(model: AllOperators, example: tuple[int, int], strict: bool) -> None:
    program = export(model, tuple(make_inputs(*example)), strict=strict)
    check_program(program)
    inputs = [v for v in program.graph.nodes if v.op == "placeholder" and v.name in program.graph_signature.user_inputs]
    first = [str(node.meta["val"].shape[0]) for node in inputs]
    assert first[0] == first[1] == first[2]
    assert first[3] == first[4] != first[0]
    assert_serves(program.module(), model, [*SIZES, (4, 0), (1, 0)])


@pytest.mark.parametrize("example", [(1, 1), (4, 4), (3, 7)])
def test_dynamic_is_given_and_history_length_varies(model: AllOperators, example: tuple[int, int]) -> None:
    program = export(model, tuple(make_inputs(*example)), dynamic=DYNAMIC)
    for history in (0, 1, 10, 33):
        assert_serves(program.module(), model, history=history)


def test_bare_index_and_keywords(model: AllOperators) -> None:
    user, history, lengths, candidate, index = as_tensors(make_inputs(3, 7))
    keywords = {"candidate": candidate, "index": index.int()}
    program = export(model, (user, history, lengths), keywords)
    for users, candidates in SIZES:
        inputs = make_inputs(users, candidates)
        user, history, lengths, candidate, index = as_tensors(inputs)
        scores = program.module()(user, history, lengths, candidate=candidate, index=index.int())
        torch.testing.assert_close(scores, model(*inputs))


def test_grouped_program_needs_no_sort(model: AllOperators) -> None:
    program = export(model, tuple(make_inputs(3, 7, grouped=True)), grouped=True)
    assert not [
        node for node in program.graph.nodes if "sort" in str(node.target) and "searchsorted" not in str(node.target)
    ]
    assert_serves(program.module(), model, grouped=True)
    with pytest.raises(ValueError, match="grouped needs a CandidateIndex"):
        export(model, tuple(as_tensors(make_inputs(3, 7))), grouped=True)


def test_nested_inputs_and_dict_result() -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = IKBOLinear(4, 6, 3)

        def forward(self, user: dict[str, Tensor], candidate: list[Tensor], index: Tensor) -> dict[str, Tensor]:
            return {"scores": self.first(user["a"], torch.cat(candidate, 1), index)}

    def inputs(users: int, candidates: int):
        index = torch.randint(0, users, (candidates,))
        return {"a": torch.randn(users, 4)}, [torch.randn(candidates, 2), torch.randn(candidates, 4)], index

    model = Nested().requires_grad_(False)
    program = export(model, inputs(2, 5))
    for sizes in SIZES:
        example = inputs(*sizes)
        torch.testing.assert_close(program.module()(*example)["scores"], model(*example)["scores"])


@pytest.mark.parametrize("strict", [False, True])
def test_operators_called_by_name_are_replaced(strict: bool) -> None:
    class ByName(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
            return torch.ops.ikbo.dot_interaction(user, candidate, index)

    user, _, _, candidate, index = as_tensors(make_inputs(3, 7))
    kept = torch.export.export(ByName(), (user, candidate, index))
    assert [node for node in kept.graph.nodes if "ikbo" in str(node.target)]
    program = export(ByName(), (user, candidate, index), strict=strict)
    assert not [node for node in program.graph.nodes if "ikbo" in str(node.target)]
    for users, candidates in SIZES:
        user, _, _, candidate, index = as_tensors(make_inputs(users, candidates))
        torch.testing.assert_close(program.module()(user, candidate, index), ByName()(user, candidate, index))


def test_equal_sizes_without_dynamic_say_what_to_do(model: AllOperators) -> None:
    with pytest.raises(ValueError, match=r"besides B = 4 .* dynamic=.*'index': 'B'.* or an example with U different"):
        export(model, tuple(make_inputs(4, 4)))
    with pytest.raises(ValueError, match=r"besides B = 4 "):
        export(model, tuple(as_tensors(make_inputs(4, 4))))


class Custom(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, user: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        return self.function(user, candidate, index)


@pytest.mark.parametrize(
    "function",
    [
        lambda user, candidate, index: candidate * (2 if candidate.shape[0] > 5 else 3),
        lambda user, candidate, index: candidate * (2 if candidate.shape[0] == 24 else 3),
        lambda user, candidate, index: user[:, None] + candidate.view(user.shape[0], -1, 6),
        lambda user, candidate, index: candidate.view(8, -1),
        lambda user, candidate, index: user + candidate[: user.shape[0]],
    ],
    ids=["branch", "constant", "multiple of U", "divisible by 8", "B >= U"],
)
def test_a_model_for_some_sizes_only_is_refused(function) -> None:
    inputs = (torch.randn(3, 6), torch.randn(24, 6), torch.arange(24) % 3)
    with pytest.raises(ValueError, match=r"fixes a size|the model assumes|has fixed it|one size of two"):
        export(Custom(function), inputs)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda user, candidate, index: candidate.view(5, 6),
        lambda user, candidate, index: user[index] + torch.ones(5, 6),
        lambda user, candidate, index: torch._check(candidate.shape[0] == 5) or candidate,
    ],
    ids=["view", "broadcast", "check"],
)
def test_a_batch_size_written_in_the_model_is_refused(function, strict: bool) -> None:
    inputs = (torch.randn(3, 6), torch.randn(5, 6), torch.arange(5) % 3)
    assert function(*inputs).shape == (5, 6)
    with pytest.raises(ValueError, match="Custom fixes a size that should be dynamic"):
        export(Custom(function), inputs, strict=strict)


def test_an_assertion_of_the_model_is_refused() -> None:
    def asserts_five(user: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
        assert candidate.shape[0] == 5
        return candidate

    inputs = (torch.randn(3, 6), torch.randn(5, 6), torch.arange(5) % 3)
    assert asserts_five(*inputs) is inputs[1]
    with pytest.raises(ValueError, match="Custom asserts what does not hold for the sizes it is traced with"):
        export(Custom(asserts_five), inputs)


def test_an_error_of_the_model_itself_is_not_renamed() -> None:
    inputs = (torch.randn(3, 6), torch.randn(5, 6), torch.arange(5) % 3)
    with pytest.raises(RuntimeError, match="same reduction dim|mat1 and mat2"):
        export(Custom(lambda user, candidate, index: candidate @ torch.ones(7, 2)), inputs)


@pytest.mark.parametrize("strict", [False, True])
def test_jagged_history_needs_a_bound(strict: bool) -> None:
    class Jagged(nn.Module):
        def __init__(self, max_length: int | None) -> None:
            super().__init__()
            self.attend = IKBOCrossAttention(8, 2)
            self.max_length = max_length

        def forward(self, rows: Tensor, ends: Tensor, candidate: Tensor, index: Tensor) -> Tensor:
            offsets = torch.cat((ends.new_zeros(1), ends))
            return self.attend(rows, candidate, index, offsets=offsets, max_length=self.max_length)

    def inputs(lengths: list[int], candidates: int) -> tuple[Tensor, ...]:
        index = torch.randint(0, len(lengths), (candidates,))
        return torch.randn(sum(lengths), 8), torch.tensor(lengths).cumsum(0), torch.randn(candidates, 1, 8), index

    dynamic = {"rows": {0: "L"}, "ends": "U", "candidate": "B", "index": "B"}
    with pytest.raises(ValueError, match="give max_length / max_kv_length"):
        export(Jagged(None), inputs([4, 0, 3], 5), dynamic=dynamic, strict=strict)
    bounded = Jagged(6).requires_grad_(False)
    program = export(bounded, inputs([4, 0, 3], 5), dynamic=dynamic, strict=strict)
    for lengths, candidates in [([6], 1), ([1, 2, 0, 6], 4), ([0, 5], 9)]:
        example = inputs(lengths, candidates)
        torch.testing.assert_close(program.module()(*example), bounded(*example))


class Mixed(nn.Module):
    """One argument with tensors of both batch sizes."""

    def forward(self, features: dict, index: Tensor) -> Tensor:
        (history, lengths), candidate = features["user"], features["candidate"]
        return candidate + (history.sum(1) * lengths[:, None])[index]


def mixed_inputs(users: int, candidates: int, history: int) -> tuple[dict, Tensor]:
    user = [torch.randn(users, history, 4), torch.randn(users)]
    return {"candidate": torch.randn(candidates, 4), "user": user}, torch.randint(0, users, (candidates,))


def test_dynamic_describes_the_parts_of_an_argument() -> None:
    dynamic = {"features": {"user": [{0: "U", 1: "T"}, "U"], "candidate": "B"}, "index": "B"}
    program = export(Mixed(), mixed_inputs(1, 1, 1), dynamic=dynamic)
    for users, candidates in SIZES:
        for history in (0, 1, 7):
            example = mixed_inputs(users, candidates, history)
            torch.testing.assert_close(program.module()(*example), Mixed()(*example))


@pytest.mark.parametrize(
    ("features", "error", "message"),
    [
        (
            {"item": "B"},
            ValueError,
            r"\['features'\] names 'item' but the keys of the input are \['candidate', 'user'\]",
        ),
        ({"user": ["U"]}, ValueError, r"\['features.user'\] has 1 entries but the input has 2"),
        (["U", "B"], ValueError, r"\['features'\] has 2 entries but the input is a dict"),
        ({"user": {"history": "U"}}, ValueError, r"\['features.user'\] has the keys \['history'\] but .* is a list"),
        ({"user": ["U", {1: "U"}]}, ValueError, r"\['features.user.1'\] names dimension 1 but .* shape \(3,\)"),
    ],
)
def test_a_wrong_description_of_parts(features, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        export(Mixed(), mixed_inputs(3, 5, 2), dynamic={"features": features, "index": "B"})


def test_an_index_that_is_no_tensor() -> None:
    function = lambda user, candidate, index: candidate + user[index]  # noqa: E731
    inputs = (torch.randn(3, 6), torch.randn(5, 6), [0, 1, 2, 0, 1])
    with pytest.raises(TypeError, match="index must be a CandidateIndex or an int32/int64 tensor .* got list"):
        export(Custom(function), inputs)

    class OtherName(nn.Module):
        def forward(self, user: Tensor, candidate: Tensor, owner: list[int]) -> Tensor:
            return candidate + user[owner]

    with pytest.raises(TypeError, match=r"dynamic\['owner'\] is 'B' but the input has no tensor: it is a list"):
        export(OtherName(), inputs, dynamic={"user": "U", "candidate": "B", "owner": "B"})
    index = CandidateIndex.from_user_ids(torch.arange(5) % 3, 3)
    with pytest.raises(ValueError, match="features has a CandidateIndex inside: pass it as an argument of its own"):
        export(Mixed(), ({"index": index}, index))


def test_wrong_arguments(model: AllOperators, tmp_path: Path) -> None:
    inputs = tuple(make_inputs(3, 7))
    with pytest.raises(ValueError, match="dynamic names 'users' but the inputs of forward are"):
        export(model, inputs, dynamic={**DYNAMIC, "users": "U"})
    with pytest.raises(ValueError, match="no input has the dimension 'U'"):
        export(model, inputs, dynamic={"candidate": "B", "index": "B"})
    with pytest.raises(ValueError, match="must be 'B': it is the index"):
        export(model, inputs, dynamic={**DYNAMIC, "index": "U"})
    with pytest.raises(ValueError, match="dimension 0 of candidate is 7 but 'U' is 3 elsewhere"):
        export(model, inputs, dynamic={**DYNAMIC, "candidate": "U"})
    with pytest.raises(ValueError, match=r"names dimension 3 but the input has shape \(3, 5, 16\)"):
        export(model, inputs, dynamic={**DYNAMIC, "user": {3: "U"}})
    with pytest.raises(ValueError, match="not an identifier"):
        export(model, inputs, dynamic={**DYNAMIC, "history": {0: "U", 1: "history length"}})
    with pytest.raises(TypeError, match="args must be a tuple"):
        export(model, list(inputs))
    fixed = torch.export.export(model, inputs)
    with pytest.raises(ValueError, match="0 dynamic batch sizes, not 2"):
        check_program(fixed)
    with pytest.raises(ValueError, match=r"must end in '\.pt2'"):
        package(fixed, tmp_path / "model.bin")


def test_an_operator_only_this_process_has_is_refused() -> None:
    library = torch.library.Library("ikbo", "FRAGMENT")
    library.define("opaque_for_test(Tensor x) -> Tensor")
    library.impl("opaque_for_test", torch.clone, "CPU")
    library.impl("opaque_for_test", torch.empty_like, "Meta")
    inputs = (torch.randn(3, 6), torch.randn(24, 6), torch.arange(24) % 3)
    program = export(Custom(lambda user, cand, index: torch.ops.ikbo.opaque_for_test(cand) + user[index]), inputs)
    with pytest.raises(ValueError, match="contains ikbo.opaque_for_test"):
        check_program(program)


@pytest.mark.parametrize(
    ("build", "user", "cand"),
    [
        (lambda: IKBOCompressionLinear(40, 30, 17, bias=True), (40, 64), (30, 64)),
        (lambda: IKBOLinear(60, 33, 48, activation="silu"), (60,), (33,)),
        (lambda: IKBOCrossAttention(128, 2, user_dim=40), (300, 40), (64, 128)),
    ],
)
def test_package_takes_the_portable_kernels(
    tmp_path: Path, build: Any, user: tuple[int, ...], cand: tuple[int, ...]
) -> None:
    """A program for a GPU, which has the operators of the portable kernels, as far as that goes without a GPU."""
    pytest.importorskip("triton")
    index = CandidateIndex.from_offsets(torch.tensor([0, 4, 7]), num_candidates=7)
    with torch.no_grad(), stopped_before_code() as graphs:
        program = export(build().eval(), (torch.randn(2, *user), torch.randn(7, *cand), index))
        assert "_portable" in str(program.graph)
        with pytest.raises(Passed):
            package(program, tmp_path / "model.pt2")
    (graph,) = graphs
    assert not [node for node in graph.graph.nodes if "ikbo" in str(node.target)]
    assert [node for node in graph.graph.nodes if "triton_kernel_wrapper" in str(node.target)]


@pytest.mark.slow
def test_package_serves_every_size(model: AllOperators, packaged: str) -> None:
    run = torch._inductor.aoti_load_package(packaged)
    for history in (1, 10, 33):
        assert_serves(run, model, [*SIZES, (4, 0), (1, 0), (2, 300), (40, 41)], history=history)


SERVE = """
import sys, torch
run = torch._inductor.aoti_load_package(sys.argv[1])
torch.save([run(*inputs) for inputs in torch.load(sys.argv[2])], sys.argv[3])
assert 'ikbo_recsys' not in sys.modules and 'torchrec' not in sys.modules
assert not hasattr(torch.ops.ikbo, 'linear')
print('served')
"""


@pytest.mark.slow
def test_package_runs_in_a_process_without_this_library(model: AllOperators, packaged: str, tmp_path: Path) -> None:
    # A history of no rows at all once ended the process, which no test in this one would survive.
    requests = [make_inputs(*sizes, history=history) for history in (0, 5, 10) for sizes in SIZES]
    files = tmp_path / "inputs.pt", tmp_path / "scores.pt"
    torch.save([as_tensors(inputs) for inputs in requests], files[0])
    command = [sys.executable, "-c", SERVE, packaged, *map(str, files)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "served\n"
    for inputs, scores in zip(requests, torch.load(files[1]), strict=True):
        torch.testing.assert_close(scores, model(*inputs))
