"""``retrograde.jax.scan`` beside ``jax.lax.scan``."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest

import retrograde as rg

jax = pytest.importorskip("jax")

import jax.numpy as jnp  # noqa: E402

import retrograde.jax as rj  # noqa: E402


@pytest.fixture(autouse=True)
def double():
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def leaves(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def assert_equal(ours, theirs):
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def assert_near(ours, theirs, tolerance=1e-12):
    for a, b in zip(leaves(ours), leaves(theirs), strict=True):
        assert a.shape == b.shape
        assert np.abs(a - b).max(initial=0) <= tolerance * max(1, np.abs(b).max(initial=0))


def gru(scan, weights, h, xs, **asked):
    """A loss over a gated cell: a carry of three parts, one an integer, and outputs of two."""

    def step(carry, x):
        h, n, none = carry
        x = x if x is not None else 0.1 * jnp.ones((h.shape[0], 3))
        z, r, c = jnp.split(jnp.concatenate([x, h], -1) @ weights["w"] + weights["b"], 3, -1)
        z, c = jax.nn.sigmoid(z), jnp.tanh(c * jax.nn.sigmoid(r))
        h = z * h + (1 - z) * c
        return (h, n + 1, none), {"y": h.sum(-1), "n": n}

    (h, n, _), ys = scan(step, (h, 0, None), xs, **asked)
    return (ys["y"] ** 2).sum() + 2 * h.sum() + 0.0 * n


def case(length, size=7, batch=4, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    weights = {
        "w": 0.3 * jax.random.normal(keys[0], (3 + size, 3 * size)),
        "b": jax.random.normal(keys[1], (3 * size,)),
    }
    xs = jax.random.normal(keys[2], (length, batch, 3))
    return weights, jax.random.normal(keys[3], (batch, size)), xs


def gradients(loss, *arguments):
    return jax.jit(lambda *a: jax.value_and_grad(loss, (0, 1, 2))(*a))(*arguments)


def ways(length):
    yield from ({"memory": share} for share in ("100%", "50%", "20%"))
    yield {"schedule": rg.plan(length, policy="store-all")}
    for memory, policy, sizes in (
        (1, "hsm", {}),
        (3, "hsm", {}),
        (3, "ism", {}),
        (8, "msm", {"alpha": 3}),
        (6, "best", {"alpha": 2, "beta": 2}),
    ):
        yield {"schedule": rg.plan(length, memory, policy, **sizes)}


@pytest.mark.quick(1, every=2)
@pytest.mark.parametrize("length", [3, 1, 2, 53, 64])
def test_gradients_are_those_of_lax_scan(length):
    """To rounding: which products XLA fuses depends on the processor, and on the loop's length."""
    arguments = case(length)
    expected = gradients(lambda *a: gru(jax.lax.scan, *a), *arguments)
    for asked in [*ways(length)][0 if length > 5 else 3 :]:
        assert_near(
            gradients(lambda *a, asked=asked: gru(rj.scan, *a, **asked), *arguments), expected
        )


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "asked",
    [{"unroll": 3, "reverse": True}, {"reverse": True}, {"unroll": 3}, {"_split_transpose": True}],
)
def test_options_of_lax_scan(asked):
    arguments = case(53)
    expected = gradients(lambda *a: gru(jax.lax.scan, *a, **asked), *arguments)
    found = gradients(lambda *a: gru(rj.scan, *a, memory="30%", **asked), *arguments)
    assert_near(found, expected)


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("asked", [{"memory": 1}, {}])
def test_no_steps_are_as_in_lax_scan(asked, inputs):
    weights, h, xs = case(0)

    def run(scan, weights, h, xs, **asked):
        def step(h, x):
            return jnp.tanh(h @ weights["w"][:7, :7]), (h, x)

        found = scan(step, h, xs if inputs else None, length=0, **asked)
        return sum(map(jnp.sum, jax.tree.leaves(found))), found

    def graded(scan, **asked):
        loss = jax.value_and_grad(lambda *a: run(scan, *a, **asked), (0, 1, 2), has_aux=True)
        return jax.jit(loss)(weights, h, xs)

    found, expected = graded(rj.scan, **asked), graded(jax.lax.scan)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert_equal(found, expected)


@pytest.mark.quick(0)
def test_no_inputs_and_no_gradient_for_some():
    weights, h, xs = case(60)

    def loss(scan, weights, h, **asked):
        return gru(scan, weights, h, None, length=60, **asked)

    expected = jax.grad(lambda *a: loss(jax.lax.scan, *a))(weights, h)
    assert_near(jax.grad(lambda *a: loss(rj.scan, *a, memory="30%"))(weights, h), expected)
    expected = jax.grad(lambda x: gru(jax.lax.scan, weights, h, x))(xs)
    assert_near(jax.grad(lambda x: gru(rj.scan, weights, h, x, memory="30%"))(xs), expected)


@pytest.mark.quick(0, every=2)
@pytest.mark.parametrize("keyed", ["carry", "input", "closed over"])
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_random_keys(keyed, make):
    key, xs = make(1), jnp.ones((200, 32))

    def loss(scale, scan, **asked):
        def step(carry, inputs):
            (h, k), (i, x, drawn) = carry, inputs
            k, own = jax.random.split(k)
            chosen = {"carry": own, "input": drawn, "closed over": jax.random.fold_in(key, i)}
            kept = jax.random.bernoulli(chosen[keyed], 0.9, h.shape)
            h = kept * jnp.tanh(scale * h + x)
            return (h, k), (h, k)

        inputs = jnp.arange(len(xs)), xs, jax.random.split(key, len(xs))
        _, (hs, _) = scan(step, (xs[0], key), inputs, **asked)
        return (hs**2).sum()

    expected = jax.jit(jax.grad(lambda s: loss(s, jax.lax.scan)))(0.5)
    assert_equal(jax.jit(jax.grad(lambda s: loss(s, rj.scan, memory="20%")))(0.5), expected)


@pytest.mark.quick(0)
@pytest.mark.parametrize("memory", ["30%", "10%"])
def test_parts_without_numbers(memory):
    """The first real part of the carry, and of the outputs, may be an empty array."""
    wide, none = jnp.ones((64, 64)), jnp.zeros(0)

    def loss(w, scan, **asked):
        def step(carry, _):
            return (carry[0], jnp.sin(carry[1]) * w), carry[0] * w

        (_, h), _ = scan(step, (none, wide), None, length=400, **asked)
        return h.sum()

    expected = jax.grad(lambda w: loss(w, jax.lax.scan))(0.7)
    assert_equal(jax.grad(lambda w: loss(w, rj.scan, memory=memory))(0.7), expected)


def scaled(asked):
    """A loss of one number by ``jax.lax.scan``, and by ours."""
    weights, h, xs = case(90, size=3, batch=2)

    def loss(scan, scale, **asked):
        return gru(scan, {**weights, "b": scale * weights["b"]}, h, xs, **asked)

    return lambda scale: loss(jax.lax.scan, scale), lambda scale: loss(rj.scan, scale, **asked)


@pytest.mark.quick(0)
def test_transformations_compose():
    theirs, ours = scaled({"memory": "50%"})
    scales = jnp.array([0.1, 0.5, 0.9])
    assert_near(*(jax.jit(jax.vmap(jax.grad(loss)))(scales) for loss in (ours, theirs)))
    assert_near(*(jax.jit(jax.grad(lambda s, f=f: jnp.sin(f(s))))(0.3) for f in (ours, theirs)))
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(ours, (0.3,), (1.0,))


@pytest.mark.quick(0)
@pytest.mark.parametrize(
    "second", [lambda loss: jax.grad(jax.grad(loss)), lambda loss: jax.hessian(loss)]
)
def test_second_derivatives_hold_all_and_say_so(second):
    theirs, ours = scaled({"memory": "50%"})
    with pytest.warns(UserWarning, match="the budget does not cover"):
        found = jax.jit(second(ours))(0.3)
    assert_near(found, jax.jit(second(theirs))(0.3))


def equations(jaxpr):
    """The equations of a program, those of its loops' bodies included."""
    from jax.extend.core import jaxprs_in_params

    return sum(1 + sum(map(equations, jaxprs_in_params(eqn.params))) for eqn in jaxpr.eqns)


@pytest.mark.quick(0)
def test_the_program_does_not_grow_with_the_length():
    counts, seconds = [], []
    for length in (1000, 20_000):
        weights, h, xs = case(1, size=3, batch=1)
        xs = jnp.broadcast_to(xs, (length, *xs.shape[1:]))
        schedule = rg.plan(length, 40, "hsm")
        grad = jax.grad(lambda *a, s=schedule: gru(rj.scan, *a, schedule=s))
        counts.append(equations(jax.make_jaxpr(grad)(weights, h, xs).jaxpr))
        start = time.perf_counter()
        jax.jit(grad).lower(weights, h, xs).compile()
        seconds.append(time.perf_counter() - start)
    assert counts[0] == counts[1]
    assert seconds[1] <= 2 * seconds[0] + 1


@pytest.mark.quick(0)
def test_residuals_of_constants_alone_are_not_stored():
    def loss(w, scan, **asked):
        def step(h, x):
            h = jnp.sin(w) ** 2 * h + x
            return h, h

        return (scan(step, xs[0], xs, **asked)[1] ** 2).sum()

    xs, w = jnp.linspace(0, 1, 64 * 300).reshape(300, 64), jnp.linspace(0, 1, 64)
    found = rj.fit(lambda h, x: (jnp.sin(w) ** 2 * h + x, h), xs[0], xs, memory="100%")
    assert found.ordinary_bytes < 1.05 * xs.nbytes
    ours = jax.jit(jax.grad(lambda w: loss(w, rj.scan, memory="10%")))(w)
    assert_equal(ours, jax.jit(jax.grad(lambda w: loss(w, jax.lax.scan)))(w))


def drawn(seed):
    """A random case: its operands, and a share of memory."""
    draw = np.random.default_rng(seed)
    size, batch, length = (
        int(draw.integers(low, high)) for low, high in ((1, 40), (1, 9), (1, 400))
    )
    share = float(draw.choice([0.02, 0.05, 0.1, 0.2, 0.5, 0.9]))
    return case(length, size, batch, seed), share


def compiled_bytes(loss, arguments):
    """Temporary bytes of a compiled function."""
    return jax.jit(loss).lower(*arguments).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.quick(0, every=3)
@pytest.mark.parametrize("seed", range(100))
def test_the_budget_is_kept_and_the_least_is_named(seed):
    arguments, share = drawn(seed)
    found = []

    def both(scan, **asked):
        def outputs(weights, h, xs):
            def step(carry, x):
                z, r, c = jnp.split(
                    jnp.concatenate([x, carry[0]], -1) @ weights["w"] + weights["b"], 3, -1
                )
                h = jnp.sin(z) + jax.nn.sigmoid(r) * jnp.tanh(carry[1] * c)
                return (h, 0.5 * h, carry[2] + 1), h

            if asked:
                found.append(rj.fit(step, (h, h, 0), xs, memory=asked["memory"]))
            (h, k, _), ys = scan(step, (h, h, 0), xs, **asked)
            return h, k, ys

        def run(weights, h, xs, cotangents):
            out, pull = jax.vjp(outputs, weights, h, xs)
            return out, pull(cotangents)

        return run, outputs

    theirs, forward = both(jax.lax.scan)
    cotangents = jax.tree.map(
        lambda s: jnp.ones(s.shape, s.dtype), jax.eval_shape(forward, *arguments)
    )
    alone = compiled_bytes(forward, arguments)
    with pytest.raises(rg.BudgetError) as refusal:
        jax.jit(both(rj.scan, memory=1)[0]).lower(*arguments, cotangents)
    for memory in (share, refusal.value.minimum_bytes):
        run, _ = both(rj.scan, memory=memory)
        try:
            taken = compiled_bytes(run, (*arguments, cotangents))
        except rg.BudgetError:
            assert memory == share
            continue
        assert found[-1].peak_bytes <= found[-1].budget_bytes
        if not found[-1].ordinary:
            assert taken <= found[-1].budget_bytes + alone
        assert_near(
            jax.jit(run)(*arguments, cotangents), jax.jit(theirs)(*arguments, cotangents), 1e-9
        )


ONES = np.ones((10, 3))


@pytest.mark.parametrize(
    ("step", "asked", "error", "message"),
    [
        (lambda h, x: ((h, h), x), {"memory": "50%"}, rg.CellError, "changed its structure"),
        (
            lambda h, x: (h.astype("float16"), x),
            {"memory": "50%"},
            rg.CellError,
            "changed its type",
        ),
        (lambda h, x: h, {"memory": "50%"}, rg.CellError, "expected the pair"),
        (lambda h, x: (h, x), {"memory": -5}, rg.UnitError, "at least 1 byte"),
        (lambda h, x: (h, x), {"schedule": rg.plan(11, 2)}, rg.ScheduleError, "plan one for 10"),
        (lambda h, x: (h, x), {"memory": 5, "schedule": rg.plan(10, 2)}, rg.ScheduleError, "both"),
        (lambda h, x: (h, x), {"memory": 5, "length": 9}, rg.CellError, "one number of steps"),
        (lambda h, x: (h, x), {"memory": "50%", "unroll": -2}, rg.CellError, "got unroll=-2"),
        (
            lambda h, x: (jax.debug.print("{}", h), (h, x))[1],
            {"memory": "50%"},
            rg.CellError,
            "has effects",
        ),
    ],
)
def test_bad_input_is_refused_before_any_work(step, asked, error, message):
    with pytest.raises(error, match=message):
        rj.scan(step, jnp.zeros(3), ONES, **asked)


def test_too_few_steps_and_integers_are_refused():
    with pytest.raises(rg.CellError, match="-2 steps: expected at least 0"):
        rj.scan(lambda h, x: (h, x), jnp.zeros(3), length=-2, memory="50%")
    with pytest.raises(rg.CellError, match="0 steps: expected at least 1"):
        rj.fit(lambda h, x: (h, x), jnp.zeros(3), ONES[:0], memory="50%")


@pytest.mark.parametrize("constant", [False, 0, 0.0])
@pytest.mark.parametrize("carried", [True, False])
def test_a_step_may_return_a_number_of_pythons(constant, carried):
    """In its carry, as solvers do that know a first step, or as an output."""

    def loss(w, scan, **asked):
        def step(carry, x):
            first, h = carry
            h = jnp.where(first, h, jnp.tanh(w * h + x))
            return (constant if carried else first, h), constant

        init = type(constant)(carried), jnp.ones((4, 8))
        return scan(step, init, jnp.ones((30, 4, 8)), **asked)[0][1].sum()

    ours = jax.grad(lambda w: loss(w, rj.scan, memory="60%"))(0.5)
    assert ours == jax.grad(lambda w: loss(w, jax.lax.scan))(0.5)


COLLECTIVES = {
    "sum": lambda h: h - 0.1 * jax.lax.psum(h, "batch"),
    "all": lambda h: h - 0.1 * jax.lax.all_gather(h, "batch").sum(0),
    "index": lambda h: h * 0.5 ** jax.lax.axis_index("batch"),
}


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.quick(1, every=2)
def test_collectives_over_an_axis_of_vmap(collective, last):
    """A rerun meets the same axis, though the backward pass is outside of ``vmap``."""

    def loss(w, scan, **asked):
        def sample(x):
            def step(h, x):
                h = COLLECTIVES[collective](jnp.tanh(h @ w + x))
                return h, h

            return scan(step, jnp.zeros(8), x, **asked)[0 if last else 1]

        xs = jnp.linspace(-1, 1, 40 * 4 * 8).reshape(40, 4, 8)
        return (jax.vmap(sample, in_axes=1, axis_name="batch")(xs) ** 2).sum()

    w = jnp.eye(8) / 3 + 0.05
    ours = jax.grad(lambda w: loss(w, rj.scan, memory="75%"))(w)
    assert_near(ours, jax.grad(lambda w: loss(w, jax.lax.scan))(w))


@pytest.mark.quick(0)
def test_a_mesh_with_explicit_axes():
    on_two_devices("""
import jax, jax.numpy as jnp, retrograde.jax as rj
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
with jax.set_mesh(mesh):
    xs = jax.device_put(jnp.ones((60, 4, 16)), NamedSharding(mesh, P(None, "d")))
    h = jax.device_put(jnp.zeros((4, 16)), NamedSharding(mesh, P("d")))
    w = jax.device_put(0.1 * jnp.ones((16, 16)), NamedSharding(mesh, P()))
    for last in (0, 1):
        def loss(scan, w, h, xs, **asked):
            return (scan(lambda h, x: (jnp.tanh(h @ w + x),) * 2, h, xs, **asked)[last]**2).mean()
        theirs = jax.jit(jax.grad(lambda *a: loss(jax.lax.scan, *a), (0, 1, 2)))(w, h, xs)
        for memory in ("75%", "40%"):
            run = jax.grad(lambda *a: loss(rj.scan, *a, memory=memory), (0, 1, 2))
            own = jax.jit(run)(w, h, xs)
            for a, b in zip(own, theirs, strict=True):
                assert a.sharding == b.sharding and jnp.allclose(a, b, rtol=1e-5, atol=1e-9)
print("equal")
""")


@pytest.mark.quick(0)
def test_shards_of_data_on_two_devices():
    on_two_devices("""
import jax, jax.numpy as jnp, retrograde.jax as rj
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
x = jax.device_put(jnp.arange(3840.0).reshape(60, 64) / 4e3, NamedSharding(mesh, P(None, "d")))
for checked in (True, False):
    def loss(scan, w, x, **asked):
        def local(w, x):
            h, ys = scan(lambda h, x: (jnp.tanh(w * h + x),) * 2, 0 * x[0], x, **asked)
            return jax.lax.psum((ys**2).sum(), "d")
        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P(None, "d")), out_specs=P(), check_vma=checked
        )(w, x)
    w = jnp.float32(0.5)
    theirs = jax.jit(jax.grad(lambda *a: loss(jax.lax.scan, *a), (0, 1)))(w, x)
    for asked in ({"memory": "70%"}, {"memory": "40%"}):
        ours = jax.jit(jax.grad(lambda *a: loss(rj.scan, *a, **asked), (0, 1)))(w, x)
        assert all(jnp.allclose(a, b, rtol=1e-5) for a, b in zip(ours, theirs, strict=True)), asked
print("equal")
""")


def on_two_devices(code):
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **flags}, text=True, capture_output=True
    )
    assert run.stdout.strip() == "equal", run.stderr


@pytest.mark.parametrize(
    ("statement", "absent"), [("import retrograde", "jax"), ("import retrograde.jax", "torch")]
)
def test_neither_framework_loads_the_other(statement, absent):
    code = f"{statement}\nimport sys; print({absent!r} in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"
