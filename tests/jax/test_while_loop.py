"""``retrograde.jax.while_loop`` beside a loop in Python."""

import numpy as np
import pytest

import retrograde as rg

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import retrograde.jax as rj  # noqa: E402


def far(value):
    h, n = value
    return (jnp.abs(h).max() > 0.4) & (n < 90)


def shrunk(w, value):
    h, n = value
    return jnp.tanh(h @ w), n + 1


def ours(w, h, memory="30%", max_steps=60):
    body = lambda value: shrunk(w, value)  # noqa: E731
    h, n = rj.while_loop(far, body, (h, 0), max_steps=max_steps, memory=memory)
    return (h**2).sum() + 0.0 * n, n


def in_python(w, h):
    value = h, 0
    while far(value):
        value = shrunk(w, value)
    return (value[0] ** 2).sum(), value[1]


def case(seed):
    keys = jax.random.split(jax.random.key(seed))
    w = 0.97 * jnp.linalg.qr(jax.random.normal(keys[0], (7, 7)))[0]
    return w, 2 * jax.random.normal(keys[1], (9, 7))


@pytest.mark.quick(3)
@pytest.mark.parametrize("memory", ["30%", "60%", "100%", None])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_are_the_loops(seed, memory):
    (loss, n), found = jax.jit(
        lambda *a: jax.value_and_grad(lambda *a: ours(*a, memory=memory), (0, 1), has_aux=True)(*a)
    )(*case(seed))
    (expected, count), theirs = jax.value_and_grad(in_python, (0, 1), has_aux=True)(*case(seed))
    assert n == count
    assert 3 < count < 60
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for a, b in zip(found, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_a_loop_that_does_not_begin_hands_its_value_on():
    w, h = case(0)
    (_, n), found = jax.value_and_grad(ours, 1, has_aux=True)(w, 0.1 * jnp.ones_like(h))
    assert n == 0
    np.testing.assert_allclose(found, 0.2 * jnp.ones_like(h), rtol=1e-6)


def test_a_loop_that_does_not_end_is_nan():
    w, h = case(0)
    run = jax.value_and_grad(ours, (0, 1), has_aux=True)
    (loss, n), found = run(w, h, memory="100%", max_steps=2)
    assert n == 2
    assert np.isnan(loss)
    assert all(np.isnan(g).all() for g in found)


def test_each_sample_of_a_batch_ends_by_itself():
    w, h = case(1)
    each = jnp.stack([h, 0.01 * h, 0.2 * h])
    loss, n = jax.vmap(ours, (None, 0))(w, each)
    assert len({*n.tolist()}) > 1
    for k in range(3):
        np.testing.assert_allclose(loss[k], in_python(w, each[k])[0], rtol=1e-5)


def test_the_least_budget_is_named_and_works():
    w, h = case(0)
    with pytest.raises(rg.BudgetError) as refused:
        jax.grad(lambda w: ours(w, h, memory=1)[0])(w)
    jax.grad(lambda w: ours(w, h, memory=refused.value.minimum_bytes)[0])(w)
