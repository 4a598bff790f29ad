"""Sums in which every number has a place: what a failed or a wrong load changes, and what shards add up to."""

from collections.abc import Callable

import pytest
import torch

from ycore.engine.weight_proof import (
    Part,
    Piece,
    TensorSums,
    check_read_back,
    part_sums,
    pieces_of,
    tensor_sums,
)
from ycore.errors import SyncError

DTYPES = [torch.bfloat16, torch.float32]
Q, K, V, O_PROJ = (f"layers.0.self_attn.{part}_proj.weight" for part in "qkvo")
NEXT, NORM = "layers.1.self_attn.o_proj.weight", "layers.0.norm.weight"


def made(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    sizes = {
        Q: (48, 32),
        K: (16, 32),
        V: (16, 32),
        O_PROJ: (32, 32),
        NEXT: (32, 32),
        NORM: (32,),
    }
    return {name: torch.randn(size, generator=draw).to(dtype) for name, size in sizes.items()}


def sums_of(tensors: dict[str, torch.Tensor]) -> dict[str, TensorSums]:
    return {name: tensor_sums(tensor) for name, tensor in tensors.items()}


def whole(*rows: int) -> list[Part]:
    return [Part(num, num) for num in rows]


def engine_pieces(tensors: dict[str, torch.Tensor]) -> list[Piece]:
    """Return the pieces that an engine reports: it keeps q, k and v in one matrix."""
    merged = torch.cat([tensors[Q], tensors[K], tensors[V]])
    separate = [piece(name, tensors[name]) for name in (O_PROJ, NEXT, NORM)]
    return [*pieces_of([Q, K, V], part_sums(merged, whole(48, 16, 16))), *separate]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_sent_is_verified(dtype: torch.dtype) -> None:
    assert check_read_back(sums_of(made(dtype)), engine_pieces(made(dtype))) == 1.0


def swapped(
    name: str, other: str
) -> Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
    return lambda tensors: {**tensors, name: tensors[other], other: tensors[name]}


def changed(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda tensors: {**tensors, name: change(tensors[name])}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (changed(O_PROJ, lambda weight: weight[torch.randperm(32)]), [O_PROJ]),
        (changed(O_PROJ, lambda weight: weight.roll(1, 0)), [O_PROJ]),
        (changed(O_PROJ, lambda weight: weight[:, torch.randperm(32)]), [O_PROJ]),
        (changed(O_PROJ, lambda weight: weight.roll(8, 1)), [O_PROJ]),
        (changed(O_PROJ, lambda weight: weight.T), [O_PROJ]),
        (changed(NORM, lambda weight: weight.flip(0)), [NORM]),
        (changed(K, lambda weight: weight.view(2, 8, 32).flip(0).reshape(16, 32)), [K]),
        (swapped(K, V), [K, V]),
        (swapped(O_PROJ, NEXT), [O_PROJ, NEXT]),
        (changed(Q, lambda weight: torch.cat([weight[16:32], weight[:16], weight[32:]])), [Q]),
    ],
    ids=[
        "rows permuted",
        "rows shifted",
        "columns permuted",
        "columns shifted",
        "square transposed",
        "vector reversed",
        "heads swapped",
        "k and v swapped",
        "layers swapped",
        "heads of q shifted",
    ],
)
def test_the_same_numbers_at_other_places_are_not_the_trainers(
    wrong: Callable[..., dict[str, torch.Tensor]], named: list[str], dtype: torch.dtype
) -> None:
    tensors = made(dtype)
    with pytest.raises(
        SyncError,
        match=f"^{len(named)} of 6 tensors are not the trainer's .*{sorted(named)[0]}",
    ):
        check_read_back(sums_of(tensors), engine_pieces(wrong(tensors)))


def test_q_k_and_v_in_another_order_are_seen_where_their_sizes_are_equal() -> None:
    q, k, v = (torch.randn(8, 16) for _ in range(3))
    sent = {"q": tensor_sums(q), "k": tensor_sums(k), "v": tensor_sums(v)}
    for order in ([k, q, v], [v, k, q], [q, v, k], [k, v, q]):
        with pytest.raises(SyncError, match="of 3 tensors are not the trainer's"):
            check_read_back(
                sent, pieces_of(["q", "k", "v"], part_sums(torch.cat(order), whole(8, 8, 8)))
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_change_of_one_number_is_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 64, dtype=dtype)
    before = tensor_sums(tensor)
    tensor[17, 3] = torch.nextafter(tensor[17, 3], torch.tensor(10.0, dtype=dtype))
    assert tensor_sums(tensor) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_padding_with_zeros_and_strides_change_nothing(dtype: torch.dtype) -> None:
    tensor = torch.randn(10, 8, dtype=dtype)
    sums = tensor_sums(tensor)
    padded = tensor_sums(torch.cat([tensor, torch.zeros(6, 8, dtype=dtype)]))
    assert (padded.rows, padded.columns) == (sums.rows, sums.columns)
    assert tensor_sums(torch.stack([tensor, tensor], dim=-1)[..., 0]) == sums


def test_the_sums_are_the_polynomials_that_the_module_names() -> None:
    words = torch.tensor([[3, -5], [7, 11], [13, 2**62]])
    r, c = 0x5851F42D4C957F2D, 0x14057B7EF767814F
    rows = (-2 * r + 18 * r**2 + (13 + 2**62) * r**3) % 2**64
    columns = (23 * c + (6 + 2**62) * c**2) % 2**64
    assert tensor_sums(words) == TensorSums(48, 8, rows, columns)


# -- shards ----------------------------------------------------------------------------------------------------------


def piece(name: str, shard: torch.Tensor, *, row: int = 0, column: int = 0) -> Piece:
    """`column` in numbers of the shard."""
    sums = tensor_sums(shard)
    return (
        name,
        row,
        column * shard.element_size() // sums.width,
        sums.width,
        sums.rows,
        sums.columns,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_shards_of_rows_and_of_columns_add_up_by_their_places(dtype: torch.dtype) -> None:
    tensors = made(dtype)
    first, second = tensors[Q].split(24), tensors[O_PROJ].split(16, dim=1)
    shards = [
        piece(Q, first[0]),
        piece(O_PROJ, second[0]),
        piece(NORM, tensors[NORM]),
        piece(K, tensors[K]),
    ]
    shards += [
        piece(Q, first[1], row=24),
        piece(O_PROJ, second[1], column=16),
        piece(NORM, tensors[NORM]),
    ]
    sent = {name: tensor_sums(tensors[name]) for name in (Q, O_PROJ, NORM, K)}
    assert check_read_back(sent, shards) == 1.0
    assert (
        check_read_back(sent, [*shards, piece(K, tensors[K])]) == 1.0
    )  # k and v again on a second worker


def test_shards_in_each_others_place_are_seen() -> None:
    tensor = torch.randn(32, 32)
    sent = {Q: tensor_sums(tensor)}
    above, below = tensor.split(16)
    left, right = tensor.split(16, dim=1)
    for wrong in (
        [piece(Q, below), piece(Q, above, row=16)],
        [piece(Q, right), piece(Q, left, column=16)],
        [piece(Q, above)],
        [piece(Q, above), piece(Q, above, row=16)],
        [piece(Q, above), piece(Q, below, row=16), piece(Q, left)],
    ):
        with pytest.raises(SyncError, match="1 of 1 tensors"):
            check_read_back(sent, wrong)


def test_what_is_told_twice_of_one_place_must_be_equal() -> None:
    """A tied head that keeps the first policy's weights, beside an embedding that has the last."""
    old, new = torch.randn(2, 32, 32)
    sent = {"embed.weight": tensor_sums(new)}
    assert (
        check_read_back(sent, [piece("embed.weight", new), piece("embed.weight", new)]) == 1.0
    )
    for both in ([new, old], [old, new]):
        with pytest.raises(SyncError, match=r"1 of 1 tensors .*embed\.weight"):
            check_read_back(sent, [piece("embed.weight", tensor) for tensor in both])


def test_a_checkpoints_merged_tensor_is_known_by_all_of_its_parts() -> None:
    merged = torch.randn(24, 16)
    assert (
        check_read_back(
            {"qkv": tensor_sums(merged)}, pieces_of(["qkv"], part_sums(merged, whole(8, 8, 8)))
        )
        == 1.0
    )


# -- the share -------------------------------------------------------------------------------------------------------


def test_one_verified_tensor_does_not_speak_for_the_others() -> None:
    tensors = made()
    with pytest.raises(SyncError) as refused:
        check_read_back(sums_of(tensors), [piece(NORM, tensors[NORM])])
    assert str(refused.value) == (
        "1 of 6 tensors (0.7% of the bytes) are verified, and engine.min_verified is 1: the engine does not have"
        " layers.0.self_attn.k_proj.weight, layers.0.self_attn.o_proj.weight, layers.0.self_attn.q_proj.weight, ... in"
        " the checkpoint's form, and nothing shows whether it loads them; take --engine transformers"
    )


def test_the_share_is_the_lesser_one_of_tensors_and_of_bytes() -> None:
    tensors = made()
    sent = sums_of(tensors)
    pieces = [entry for entry in engine_pieces(tensors) if entry[0] != NORM]
    with pytest.raises(
        SyncError,
        match=r"5 of 6 tensors \(99\.3% of the bytes\).* take --engine transformers$",
    ):
        check_read_back(sent, pieces)
    assert check_read_back(sent, pieces, at_least=0.833) == pytest.approx(5 / 6)
    assert check_read_back(sent, [], at_least=0.0) == 0.0


def test_merged_parts_of_unknown_sizes_and_words_of_another_width_verify_nothing() -> None:
    tensors = made()
    merged = torch.cat([tensors[Q], tensors[K], tensors[V]])
    assert pieces_of([Q, K, V], part_sums(merged, [])) == []
    with pytest.raises(SyncError, match="0 of 1 tensors"):
        check_read_back({Q: tensor_sums(tensors[Q])}, [piece(Q, tensors[Q][:, :3])])


def test_a_wrong_tensor_is_refused_whatever_share_is_accepted() -> None:
    tensors = made()
    with pytest.raises(SyncError, match="2 of 6 tensors"):
        check_read_back(sums_of(tensors), engine_pieces(swapped(K, V)(tensors)), at_least=0.0)
