"""Pickles that hold arrays, and those that would do more."""

import io
import pickle
import tracemalloc

import numpy as np
import pytest

from personafl.data import formats
from personafl.data.checksums import DataError
from personafl.data.unpickle import numbers, unpickle, unwrap
from tests.data.written import PIXELS, Harm, put


def test_a_pickle_may_hold_arrays_of_every_protocol(tmp_path):
    for protocol in range(2, 6):
        path = put(tmp_path / "b", pickle.dumps({"data": PIXELS, b"labels": [1] * 12, "name": b"raw"}, protocol))
        assert np.array_equal(formats.read_cifar_python(path, "labels", 10)[0].reshape(12, -1), PIXELS)


def test_a_pickle_that_would_run_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for harmful in (Harm(), {"data": Harm()}, {"data": np.array([Harm()], object)}):
        with pytest.raises(DataError, match=r"not a data batch: it asks for \w+\.mkdir"):
            formats.read_pickle(put(tmp_path / "b", pickle.dumps(harmful)))
    assert not (tmp_path / "harm").exists()


@pytest.mark.parametrize("protocol", [2, 5])
def test_an_array_that_claims_more_than_its_bytes_is_refused(protocol):
    raw = pickle.dumps(np.arange(7, dtype=np.uint8), protocol)
    assert unwrap(unpickle(io.BytesIO(raw))).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert raw.count(b"K\x07\x85") == 1  # the shape: (7,)
    with pytest.raises(pickle.UnpicklingError, match=r"an array of shape \(255,\) with 7 bytes"):
        unpickle(io.BytesIO(raw.replace(b"K\x07\x85", b"K\xff\x85")))


RECONSTRUCT, NDARRAY, DTYPE, SCALAR, ENCODE = (
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"cnumpy\nndarray\n",
    b"cnumpy\ndtype\n",
    b"cnumpy.core.multiarray\nscalar\n",
    b"c_codecs\nencode\n",
)
OBJECTS = DTYPE + b"(VO8\nI0\nI1\ntR"
BYTES = DTYPE + b"(Vu1\nI0\nI1\ntR"
EMPTY = RECONSTRUCT + b"(" + NDARRAY + b"(I0\ntC\x01btR"
DOUBLED = b")p0\n" + b"".join(b"g%d\n\x86p%d\n" % (i, i + 1) for i in range(60))  # (((), ()), ((), ())) and so on

HOSTILE = {
    "objects over foreign bytes": (EMPTY + b"(I1\n(I1\nt" + OBJECTS + b"I00\nC\x08AAAAAAAAtb.", "a damaged array"),
    "a number over foreign bytes": (SCALAR + b"(" + OBJECTS + b"C\x08AAAAAAAAtR.", "a damaged array"),
    "a number that is an object": (SCALAR + b"(" + OBJECTS + b"](NetR.", "an object in place of a number"),
    "the type itself called": (NDARRAY + b"(I9\ntR.", "it makes a call that no data need"),
    "a call with as many arguments as a file likes": (DTYPE + b"(" + b"I1\n" * 99 + b"tR.", "it makes a call"),
    "a call with bytes for arguments": (DTYPE + b"C\x08AAAAAAAAR.", "it makes a call"),
    "the type itself made": (NDARRAY + b")\x81.", "it has the instruction NEWOBJ"),
    "state given to the type itself": (NDARRAY + b"(I1\n(I1\nt" + BYTES + b"I00\nC\x01Atb.", "other than an array"),
    "state given to a function": (ENCODE + b"(N}V__defaults__\n(VA\nVlatin1\ntstb.", "it changes something other than"),
    "state given to a function of the unpickler": (RECONSTRUCT + b"(N}V__defaults__\n)stb.", "other than an array"),
    "bytes of gigabytes": (b"\x8e\x00\x00\x00\x00\x01\x00\x00\x00abc.", "truncated"),
    "an array of gigabytes": (b"\x80\x05\x96\x00\x00\x00\x00\x01\x00\x00\x00abc.", "truncated"),
    "a frame of gigabytes": (b"\x80\x05\x95\x00\x00\x00\x00\x01\x00\x00\x00N", "truncated"),
    "a key that takes for ever to hash": (b"}(" + DOUBLED + b"Nu.", "a dictionary with a tuple for a key"),
    "a key that ends a program which hashes it": (
        b"})" + b"\x85" * 10**6 + b"Ns.",
        "a dictionary with a tuple for a key",
    ),
    "a later key that takes for ever to hash": (b"}(Va\nN" + DOUBLED + b"Nu.", "a dictionary with a tuple for a key"),
    "a key of a dictionary in one instruction": (b"(" + DOUBLED + b"Nd.", "a dictionary with a tuple for a key"),
    "keys whose hashes can be chosen": (b"}K\x01Ns.", "a dictionary with a int for a key"),
    "numbers of values whose hashes can be chosen": (b"Np%d\n." % (2**61 - 1), "under numbers that no pickler gives"),
    "an item of a list": (b"(NNlVa\nNs.", "damaged"),
    "two values": (b"NN.", "it does not end with one value"),
    "a mark at the end": (b"N(.", "it does not end with one value"),
    "rows without anything in them": (
        EMPTY + b"(I1\n(L1099511627776L\nI0\nt" + BYTES + b"I00\nC\x00tb.",
        "whose rows are empty",
    ),
    "a type that takes for ever to tell": (DTYPE + b"(" + DOUBLED + b"tR.", "an array of tuple, not of numbers"),
    "a shape past counting": (
        EMPTY + b"(I1\n(" + b"L9999999999999999L\n" * 2 + b"t" + BYTES + b"I00\nC\x01Atb.",
        "an impossible shape",
    ),
    "nothing in a shape past counting": (
        EMPTY + b"(I1\n(I0\n" + b"L9999999999999L\n" * 4 + b"t" + BYTES + b"I00\nC\x00tb.",
        "an impossible shape",
    ),
    "forty axes": (EMPTY + b"(I1\n(" + b"I1\n" * 40 + b"t" + BYTES + b"I00\nC\x01Atb.", "a damaged array"),
    "something outside": (b"Psomewhere\n.", "it has the instruction PERSID"),
    "a name of several lines": (b"\x8c\x03a\nb\x8c\x01c\x93.", r"it asks for 'a\\nb\.c', which no data need"),
    "a number of three parts": (SCALAR + b"(" + BYTES + b"NNtR.", "damaged"),
    "no value": (b".", "it does not end with one value"),
    "an instruction that is none": (b"\xff.", "it has the instruction 255"),
    "no mark": (b"t.", "damaged"),
    "nothing of that number": (b"g7\n.", "not found at index 7"),
    "an odd number of items": (b"}(Va\nu.", "damaged"),
}


@pytest.mark.parametrize(("raw", "told"), HOSTILE.values(), ids=HOSTILE)
def test_a_pickle_that_no_program_of_good_will_writes_is_refused(raw, told):
    with pytest.raises(pickle.UnpicklingError, match=told) as refused:
        unpickle(io.BytesIO(raw))
    assert "\n" not in str(refused.value)


def test_a_memo_makes_no_room_for_a_high_number():
    """C's unpickler makes room for as many as the highest number says."""
    tracemalloc.start()
    with pytest.raises(pickle.UnpicklingError, match="under numbers that no pickler gives"):
        unpickle(io.BytesIO(b"Nr\x00\x00\x00\x08."))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_is_cut_anywhere_is_truncated(protocol: int):
    whole = pickle.dumps({"data": np.arange(6, dtype=np.uint8).reshape(2, 3), "labels": [3, 300]}, protocol)
    assert unpickle(io.BytesIO(whole))["labels"] == [3, 300]
    for end in range(len(whole)):
        with pytest.raises(pickle.UnpicklingError) as refused:
            unpickle(io.BytesIO(whole[:end]))
        assert str(refused.value) == "truncated: it ends early" or whole[end - 1 : end] == pickle.STOP, end


def test_objects_in_columns_stay_where_they_are():
    table = np.asfortranarray(np.array([["a", "b", "c"], ["d", "e", "f"]], dtype=object))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        found = unwrap(unpickle(io.BytesIO(pickle.dumps(table, protocol))))
        assert found.tolist() == table.tolist()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (RECONSTRUCT + b")R", "an array without its bytes"),
        (NDARRAY, "must be an array of numbers"),
        (b"]]a", "must be an array of numbers"),
        (b"](L" + b"9" * 400 + b"L\nI1\ne", "must be an array of numbers"),
    ],
    ids=["unfinished", "a name", "lists", "a number of any length"],
)
def test_what_should_be_an_array_and_is_none_is_refused(tmp_path, value, told):
    path = put(tmp_path / "b", b"}(Vdata\n" + value + b"Vlabels\n]u.")
    with pytest.raises(DataError, match=told):
        formats.read_cifar_python(path, "labels", 10)


def test_one_array_many_times_in_a_list_is_refused():
    held = unpickle(io.BytesIO(pickle.dumps([np.zeros(9)] * 3)))
    with pytest.raises(pickle.UnpicklingError, match="x holds one array twice"):
        numbers(held, "x")
    held = unpickle(io.BytesIO(pickle.dumps([np.zeros(9) for _ in range(3)])))
    assert numbers(held, "x").shape == (3, 9)


BLOCK = b"B\xe8\x03\x00\x00" + b"A" * 1000  # a thousand bytes
STATE = b"(I1\n(M\xe8\x03t" + BYTES + b"I00\n" + BLOCK + b"t"


@pytest.mark.parametrize(
    ("begin", "again"),
    [(STATE + b"p0\n", EMPTY + b"g0\nb"), (b"V" + b"A" * 1000 + b"\np0\n", ENCODE + b"(g0\nVlatin1\ntR")],
    ids=["arrays", "encoded text"],
)
def test_bytes_that_are_made_into_arrays_again_and_again_are_refused(begin, again):
    """Else a file of a megabyte could take gigabytes: each array is a few instructions that name the same bytes."""
    assert len(unpickle(io.BytesIO(b"](" + begin + again * 2 + b"e."))) == 3
    with pytest.raises(pickle.UnpicklingError, match="its arrays are larger than the file"):
        unpickle(io.BytesIO(b"](" + begin + again * 9 + b"e."))
