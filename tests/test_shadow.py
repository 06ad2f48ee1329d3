"""The difference between the published bits and the weights of now, against plain numpy."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import numpy as np
import pytest

from vllm_delta.codec import Change, encode_delta, gap
from vllm_delta.codec.order import add_steps
from vllm_delta.difference import CHUNK as _CHUNK
from vllm_delta.errors import DeltaError
from vllm_delta.fingerprint import coefficients, fingerprint, weigh
from vllm_delta.format import Schema, TensorSpec
from vllm_delta.shadow import Proof, Shadow

WIDTHS = {"BF16": "u2", "F16": "u2", "F32": "u4", "F8_E4M3": "u1"}


def pair(dtype: str, n: int, share: float, seed: int = 0):
    """A one-tensor shadow, and bits of which about `share` differ from it."""
    rng = np.random.default_rng([seed, n])
    kind = np.dtype(WIDTHS[dtype])
    old = rng.integers(0, np.iinfo(kind).max, n, dtype=kind, endpoint=True)
    new = old.copy()
    places = rng.random(n) < share
    new[places] ^= rng.integers(1, np.iinfo(kind).max, int(places.sum()), dtype=kind, endpoint=True)
    schema = Schema((TensorSpec("w", dtype, (n,)),))
    return Shadow(schema, [old]), old, new


@pytest.mark.parametrize("dtype", WIDTHS)
@pytest.mark.parametrize("n", [1, 3, 7, 8, 1009, _CHUNK - 1, _CHUNK, _CHUNK + 13])
def test_a_diff_names_exactly_the_changed_elements(dtype, n):
    shadow, old, new = pair(dtype, n, 0.05)
    new[-1] = ~old[-1]
    change = shadow.diff(0, new, raw_above=1.0)
    np.testing.assert_array_equal(change.indices, np.flatnonzero(old != new))
    np.testing.assert_array_equal(add_steps(old[change.indices], change.steps), new[change.indices])
    spec = shadow.schema.tensors[0]
    assert change.touched == weigh(old[change.indices], coefficients(spec, change.indices))
    assert change.target == fingerprint(new, spec)
    assert change.nnz == shadow.n_different(change)


@pytest.mark.parametrize("skew", [1, 3])
def test_a_diff_is_the_same_wherever_the_weights_lie_in_memory(skew):
    shadow, old, new = pair("BF16", 5003, 0.1)
    memory = np.empty(new.size + skew, new.dtype)
    memory[skew:] = new
    assert memory[skew:].ctypes.data % 8
    change = shadow.diff(0, memory[skew:], raw_above=1.0)
    np.testing.assert_array_equal(change.indices, np.flatnonzero(old != new))


def test_equal_bits_give_no_change():
    shadow, old, _ = pair("BF16", 4099, 0)
    assert shadow.diff(0, old.copy(), raw_above=0.3) is None


def test_a_tensor_that_changed_more_than_the_limit_is_replaced_whole():
    shadow, _, new = pair("BF16", 1000, 0)
    new[:300] ^= 1
    assert shadow.diff(0, new, raw_above=0.3).indices is not None
    new[300] ^= 1
    change = shadow.diff(0, new, raw_above=0.3)
    assert change.bits is new
    assert change.touched == shadow.fingerprints[0]
    assert shadow.n_different(change) == 301


def test_a_shadow_that_advanced_holds_the_new_bits_and_fingerprints():
    for raw_above in (0.0, 1.0):
        shadow, _, new = pair("F32", 2003, 0.2)
        shadow.advance([shadow.diff(0, new, raw_above=raw_above)])
        np.testing.assert_array_equal(shadow.bits[0], new)
        assert shadow.fingerprints[0] == fingerprint(new, shadow.schema.tensors[0])
        assert shadow.diff(0, new, raw_above=0.3) is None


def test_the_proof_refuses_a_blob_that_is_not_what_was_encoded():
    shadow, _, new = pair("BF16", 1000, 0.1)
    change = shadow.diff(0, new, raw_above=0.3)
    other = change.steps.copy()
    other[7] += 1
    wrong = Change(0, change.indices, other, None, change.touched, change.target)
    proof = Proof(shadow.schema, "delta")
    proof.expect([change])
    with pytest.raises(DeltaError, match="does not decode"):
        proof.check(next(encode_delta(shadow.schema, [wrong])))
    proof = Proof(shadow.schema, "delta")
    proof.expect([change])
    with pytest.raises(DeltaError, match="not encoded"):
        proof.finish()
    proof.check(next(encode_delta(shadow.schema, [change])))
    proof.finish()


def test_more_changes_than_a_blob_holds_replace_the_tensor(monkeypatch):
    monkeypatch.setattr(gap, "MAX_CHANGES", 40)
    shadow, _, new = pair("BF16", 1009, 0)
    new[:40] ^= 1
    assert shadow.diff(0, new, raw_above=0.3).nnz == 40
    new[40] ^= 1
    change = shadow.diff(0, new, raw_above=0.3)
    assert change.bits is not None
    assert len(list(encode_delta(shadow.schema, [change]))) == 1


def test_the_proof_takes_a_replacement_for_steps_only_where_it_is_the_same_to_the_bit():
    """An encoder may choose to replace a tensor whole; what it then becomes must be the same."""
    shadow, _, new = pair("BF16", 1000, 0.4)
    change = shadow.diff(0, new, raw_above=1.0)
    whole = shadow.diff(0, new, raw_above=0.0)
    other = new.copy()
    other[0] ^= 1
    wrong = (
        (replace(whole, bits=other), shadow),
        (replace(whole, touched=whole.touched ^ 1), shadow),
        (replace(whole, target=whole.target ^ 1), shadow),
        (whole, None),
    )
    for blob_of, knows in [(whole, shadow), *wrong]:
        proof = Proof(shadow.schema, "delta", knows)
        proof.expect([change])
        (blob,) = encode_delta(shadow.schema, [blob_of])
        if knows and blob_of is whole:
            proof.check(blob)
            proof.finish()
        else:
            with pytest.raises(DeltaError, match="does not decode"):
                proof.check(blob)
    proof = Proof(shadow.schema, "delta", shadow)
    with pytest.raises(DeltaError, match="does not decode"):
        proof.check(next(encode_delta(shadow.schema, [whole])))


def test_a_shadow_goes_back_to_a_base_for_a_while_and_comes_forth_again_whatever_happens():
    shadow, old, new = pair("F32", 2003, 0.2)
    before = list(shadow.fingerprints)
    change = shadow.diff(0, new, raw_above=1.0)
    shadow.advance([change])
    after = list(shadow.fingerprints)
    for error in (None, ValueError):
        with contextlib.suppress(ValueError), shadow.before(lambda: [change], before):
            assert shadow.torn
            assert shadow.fingerprints == before
            np.testing.assert_array_equal(shadow.bits[0], old)
            if error:
                raise error
        assert not shadow.torn
        assert shadow.fingerprints == after
        np.testing.assert_array_equal(shadow.bits[0], new)


def test_diffs_name_each_tensor_that_differs_and_no_other(monkeypatch):
    """Tensors compared together, in batches and by two threads, change as each does alone."""
    monkeypatch.setattr("vllm_delta.shadow._BATCH", 1500)
    rng = np.random.default_rng(7)
    dtypes = ["BF16", "F32", "I32", "BF16", "F8_E4M3", "BF16", "BF16"]
    sizes = [1000, 37, 50, 0, 900, 2000, 300]
    specs = [
        TensorSpec(f"t{n}", dtype, (size,))
        for n, (dtype, size) in enumerate(zip(dtypes, sizes, strict=True))
    ]
    kinds = {**WIDTHS, "I32": "u4"}
    old = [
        rng.integers(0, 200, s.numel).astype(kinds[s.dtype]) if s.numel else np.empty(0, "u2")
        for s in specs
    ]
    new = [bits.copy() for bits in old]
    for place in (0, 1, 2, 5):
        new[place][::9] += 1
    new[4][:800] ^= 1  # more than the limit
    schema = Schema(tuple(specs))
    shadow = Shadow(schema, old)
    alone = [shadow.diff(place, bits, raw_above=0.5) for place, bits in enumerate(new)]
    together = list(shadow.diffs(iter(new), raw_above=0.5, n_threads=2))
    assert [change.tensor for change in together] == [0, 1, 2, 4, 5]
    for change in together:
        expected = alone[change.tensor]
        assert (change.touched, change.target) == (expected.touched, expected.target)
        for mine, theirs in zip(
            (change.indices, change.steps, change.bits),
            (expected.indices, expected.steps, expected.bits),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
    assert together[3].bits is not None
